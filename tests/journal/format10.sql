BEGIN TRANSACTION;
CREATE TABLE api_key (name TEXT PRIMARY KEY, salt BLOB NOT NULL, digest BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE breakpoint_vector (
    session TEXT NOT NULL, tensor BLOB NOT NULL, PRIMARY KEY (session, tensor)
) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoint_vector" VALUES('ses_18ec80b2c1812499f75f02b9724368b86424',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE breakpoints (session TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoints" VALUES('ses_18ec80b2c1812499f75f02b9724368b86424','[{"id":"bp_a9ab05d26e35c37b","layers":[0],"action":"edit","when":{"in_pass":"any","position":null,"token_id":null,"every":null},"edits":[{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null,"part":null,"keep_norm":false,"gate":null,"feature":null}],"once":false,"timeout_s":600.0,"on_timeout":"resume","point":"resid_post","heads":[]}]');
CREATE TABLE home (
    session TEXT PRIMARY KEY, state TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, peer TEXT NOT NULL,
    peer_seq INTEGER NOT NULL, owner TEXT, name TEXT, peer_journal TEXT NOT NULL DEFAULT ''
) STRICT, WITHOUT ROWID;
CREATE TABLE identity (
    id INTEGER PRIMARY KEY CHECK (id = 1), uuid TEXT NOT NULL, starts INTEGER NOT NULL, attempt TEXT NOT NULL
) STRICT;
INSERT INTO "identity" VALUES(1,'52cf482f-9825-470e-a2e3-d59eab1d4e63',0,'');
CREATE TABLE intervention (
    session TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, tensor BLOB, PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;
INSERT INTO "intervention" VALUES('ses_18ec80b2c1812499f75f02b9724368b86424',0,'[{"first":0,"end":10,"boundary":1,"edit":{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null,"part":null,"keep_norm":false,"gate":null,"feature":null},"only":[],"point":"resid_post"}]',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE keyed_request (
    owner TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL, at REAL NOT NULL, session TEXT NOT NULL,
    response TEXT, turn TEXT, token_ids BLOB, PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE model (name TEXT NOT NULL, vocab_size INTEGER NOT NULL, layers INTEGER NOT NULL, hidden INTEGER NOT NULL)
STRICT;
INSERT INTO "model" VALUES('tiny-llama',512,4,64);
CREATE TABLE proof (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
CREATE TABLE response (id TEXT PRIMARY KEY, session TEXT NOT NULL, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "response" VALUES('resp_92bba2a36ca23ed74e124dd1e1fcad7c','ses_18ec80b2cc9a3fc815a674f8581fa03747a9','{"conversation":"resp_92bba2a36ca23ed74e124dd1e1fcad7c","owns_session":true,"start":0,"before":[],"input":[{"id":"msg_33a08eb44bfeb7cdc452c9f29c899581","type":"message","role":"user","content":[{"type":"input_text","text":"Hi"}],"status":"completed"}],"answer":{"id":"resp_92bba2a36ca23ed74e124dd1e1fcad7c","object":"response","created_at":1795951856,"completed_at":null,"status":"incomplete","background":false,"error":null,"incomplete_details":{"reason":"max_output_tokens"},"instructions":null,"max_output_tokens":4,"model":"tiny-llama","output":[{"id":"msg_ca2decc5ee40378058de72c465c7b28b","type":"message","role":"assistant","content":[{"type":"output_text","text":"<311>�%�","annotations":[],"logprobs":[]}],"status":"incomplete"}],"parallel_tool_calls":true,"previous_response_id":null,"conversation":null,"store":true,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,"truncation":"disabled","usage":{"input_tokens":21,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":21},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":25},"user":null,"metadata":{}},"is_deleted":false,"removed":[]}');
CREATE TABLE response_gone (response TEXT PRIMARY KEY, session TEXT NOT NULL, seq INTEGER NOT NULL)
STRICT, WITHOUT ROWID;
CREATE TABLE session (
    id TEXT PRIMARY KEY, owner TEXT, name TEXT, metadata TEXT NOT NULL, ttl_s INTEGER, residency TEXT NOT NULL,
    phase TEXT NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL, usage TEXT NOT NULL,
    forked_from TEXT, forked_tokens INTEGER, namespace TEXT,
    adapter TEXT, adapter_digest TEXT
) STRICT, WITHOUT ROWID;
INSERT INTO "session" VALUES('ses_18ec80b284dee7f10fb7b8aa7ed0abdfb69c',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','idle',1.79595185563577508926e+09,1.79595185584541916848e+09,'{"prompt_tokens":15,"cached_tokens":10,"completion_tokens":16,"tokens_recomputed":0,"queue_ms":0.6092889998399187,"restore_ms":0.0,"prefill_ms":10.689517001083004,"last":{"prompt_tokens":12,"cached_tokens":10,"completion_tokens":8,"tokens_recomputed":0},"answers":[3,12]}',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec80b2922fb2495a000384e92f2c28f469',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.79595185585916376118e+09,1.79595185594123029704e+09,'{"prompt_tokens":21,"cached_tokens":19,"completion_tokens":8,"tokens_recomputed":0,"queue_ms":0.5752119996031979,"restore_ms":0.0,"prefill_ms":9.546630999466288,"last":{"prompt_tokens":21,"cached_tokens":19,"completion_tokens":8,"tokens_recomputed":0},"answers":[3,12,21]}','ses_18ec80b284dee7f10fb7b8aa7ed0abdfb69c',20,NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec80b2c1812499f75f02b9724368b86424',NULL,NULL,'{}',2592000,'guaranteed','compute',1.79595185665302538866e+09,1.79595185667128109932e+09,'{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":8,"tokens_recomputed":0,"queue_ms":0.6229209993762197,"restore_ms":0.0,"prefill_ms":2.0894749995932216,"last":{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":8,"tokens_recomputed":0},"answers":[3]}',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec80b2c8b78884ca76f66876ff235bfaa5',NULL,'conversation 7','{}',86400,'best_effort','compute',1.79595185677403235439e+09,1.79595185677970838543e+09,'{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0,"queue_ms":0.5261099995550467,"restore_ms":0.0,"prefill_ms":2.1986659994581714,"last":{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0},"answers":[3]}',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec80b2cc9a3fc815a674f8581fa03747a9',NULL,'
','{}',86400,'best_effort','compute',1.79595185683922052384e+09,1.79595185687741947175e+09,'{"prompt_tokens":21,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0,"queue_ms":1.444528001229628,"restore_ms":0.0,"prefill_ms":10.270468999806326,"last":{"prompt_tokens":21,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0},"answers":[21]}',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec80b2d1177b9bb68d9d7c439cbba7d416',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.79595185691453909874e+09,1.79595185691453957561e+09,'{"prompt_tokens":0,"cached_tokens":0,"completion_tokens":0,"tokens_recomputed":0,"queue_ms":0.0,"restore_ms":0.0,"prefill_ms":0.0,"last":null,"answers":[]}',NULL,NULL,'ses_18ec80b2d1177b9bb68d9d7c439cbba7d416',NULL,NULL);
CREATE TABLE tensor (digest BLOB PRIMARY KEY, data BLOB NOT NULL) STRICT;
INSERT INTO "tensor" VALUES(X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0',X'0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F');
CREATE TABLE tokens (
    session TEXT NOT NULL, position INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (session, position)
) STRICT, WITHOUT ROWID;
INSERT INTO "tokens" VALUES('ses_18ec80b284dee7f10fb7b8aa7ed0abdfb69c',0,X'0500000006000000070000001F01000024010000E10100005E01000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec80b284dee7f10fb7b8aa7ed0abdfb69c',11,X'09000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec80b2922fb2495a000384e92f2c28f469',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec80b2922fb2495a000384e92f2c28f469',20,X'0B000000E10100005E0100004400000044000000C700000044000000C700000044000000');
INSERT INTO "tokens" VALUES('ses_18ec80b2c1812499f75f02b9724368b86424',0,X'0500000006000000070000001101000011010000110100001101000011010000110100001101000011010000');
INSERT INTO "tokens" VALUES('ses_18ec80b2c8b78884ca76f66876ff235bfaa5',0,X'0500000006000000070000001F01000024010000E10100005E010000');
INSERT INTO "tokens" VALUES('ses_18ec80b2cc9a3fc815a674f8581fa03747a9',0,X'02010000750000007300000065000000720000000A0000004800000069000000030100000A00000002010000610000007300000073000000690000007300000074000000610000006E000000740000000A00000037010000B300000025000000F3000000');
INSERT INTO "tokens" VALUES('ses_18ec80b2d1177b9bb68d9d7c439cbba7d416',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
CREATE TABLE upload (
    owner TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL, tensor BLOB,
    PRIMARY KEY (owner, kind, name)
) STRICT, WITHOUT ROWID;
INSERT INTO "upload" VALUES('','vector','calm','{"dtype": "float32", "shape": [64]}',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE INDEX breakpoint_vector_tensor ON breakpoint_vector (tensor) WHERE tensor IS NOT NULL;
CREATE TRIGGER breakpoint_vector_deleted AFTER DELETE ON breakpoint_vector BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM upload WHERE tensor = old.tensor); END;
CREATE TRIGGER breakpoint_vector_changed AFTER UPDATE OF tensor ON breakpoint_vector WHEN old.tensor IS NOT new.tensor BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM upload WHERE tensor = old.tensor); END;
CREATE INDEX intervention_tensor ON intervention (tensor) WHERE tensor IS NOT NULL;
CREATE TRIGGER intervention_deleted AFTER DELETE ON intervention BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM upload WHERE tensor = old.tensor); END;
CREATE TRIGGER intervention_changed AFTER UPDATE OF tensor ON intervention WHEN old.tensor IS NOT new.tensor BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM upload WHERE tensor = old.tensor); END;
CREATE INDEX upload_tensor ON upload (tensor) WHERE tensor IS NOT NULL;
CREATE TRIGGER upload_deleted AFTER DELETE ON upload BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM upload WHERE tensor = old.tensor); END;
CREATE TRIGGER upload_changed AFTER UPDATE OF tensor ON upload WHEN old.tensor IS NOT new.tensor BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM upload WHERE tensor = old.tensor); END;
CREATE INDEX response_of_session ON response (session);
CREATE INDEX home_seq ON home (seq);
CREATE INDEX response_gone_seq ON response_gone (seq);
CREATE INDEX keyed_request_session ON keyed_request (session);
CREATE INDEX keyed_request_at ON keyed_request (owner, at);
COMMIT;
PRAGMA user_version = 10;
