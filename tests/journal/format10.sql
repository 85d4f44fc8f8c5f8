BEGIN TRANSACTION;
CREATE TABLE api_key (name TEXT PRIMARY KEY, salt BLOB NOT NULL, digest BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE breakpoint_vector (
    session TEXT NOT NULL, tensor BLOB NOT NULL, PRIMARY KEY (session, tensor)
) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoint_vector" VALUES('ses_18ec730673f6fb21dd6cd974858a03900bf1',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE breakpoints (session TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoints" VALUES('ses_18ec730673f6fb21dd6cd974858a03900bf1','[{"id":"bp_cbc8e96023547955","layers":[0],"action":"edit","when":{"in_pass":"any","position":null,"token_id":null,"every":null},"edits":[{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null}],"once":false,"timeout_s":600.0,"on_timeout":"resume"}]');
CREATE TABLE home (
    session TEXT PRIMARY KEY, state TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, peer TEXT NOT NULL,
    peer_seq INTEGER NOT NULL, owner TEXT, name TEXT, peer_journal TEXT NOT NULL DEFAULT ''
) STRICT, WITHOUT ROWID;
CREATE TABLE identity (
    id INTEGER PRIMARY KEY CHECK (id = 1), uuid TEXT NOT NULL, starts INTEGER NOT NULL, attempt TEXT NOT NULL
) STRICT;
INSERT INTO "identity" VALUES(1,'359b7abb-e8e3-4963-a44e-e8059c80b975',0,'');
CREATE TABLE intervention (
    session TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, tensor BLOB, PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;
INSERT INTO "intervention" VALUES('ses_18ec730673f6fb21dd6cd974858a03900bf1',0,'[{"first":0,"end":10,"boundary":1,"edit":{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null},"only":[]}]',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE keyed_request (
    owner TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL, at REAL NOT NULL, session TEXT NOT NULL,
    response TEXT, turn TEXT, token_ids BLOB, PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE model (name TEXT NOT NULL, vocab_size INTEGER NOT NULL, layers INTEGER NOT NULL, hidden INTEGER NOT NULL)
STRICT;
INSERT INTO "model" VALUES('tiny-llama',512,4,64);
CREATE TABLE proof (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
CREATE TABLE response (id TEXT PRIMARY KEY, session TEXT NOT NULL, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "response" VALUES('resp_60707fa0cc1355c1abf900652ad1c407','ses_18ec73067b9b2c0f00e255fd1e36962dd293','{"conversation":"resp_60707fa0cc1355c1abf900652ad1c407","owns_session":true,"start":0,"before":[],"input":[{"id":"msg_64d809607eca29184d55674e703dac0b","type":"message","role":"user","content":[{"type":"input_text","text":"Hi"}],"status":"completed"}],"answer":{"id":"resp_60707fa0cc1355c1abf900652ad1c407","object":"response","created_at":1795936823,"completed_at":null,"status":"incomplete","background":false,"error":null,"incomplete_details":{"reason":"max_output_tokens"},"instructions":null,"max_output_tokens":4,"model":"tiny-llama","output":[{"id":"msg_961488d348e213ddbb3ff91705224db3","type":"message","role":"assistant","content":[{"type":"output_text","text":"�8<366><431>","annotations":[],"logprobs":[]}],"status":"incomplete"}],"parallel_tool_calls":true,"previous_response_id":null,"conversation":null,"store":true,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,"truncation":"disabled","usage":{"input_tokens":21,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":21},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":25},"user":null,"metadata":{}},"is_deleted":false,"removed":[]}');
CREATE TABLE response_gone (response TEXT PRIMARY KEY, session TEXT NOT NULL, seq INTEGER NOT NULL)
STRICT, WITHOUT ROWID;
CREATE TABLE session (
    id TEXT PRIMARY KEY, owner TEXT, name TEXT, metadata TEXT NOT NULL, ttl_s INTEGER, residency TEXT NOT NULL,
    phase TEXT NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL, usage TEXT NOT NULL,
    forked_from TEXT, forked_tokens INTEGER, namespace TEXT
) STRICT, WITHOUT ROWID;
INSERT INTO "session" VALUES('ses_18ec730667b4f6a6b573d4a643514a876f17',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','idle',1.79593682276096200944e+09,1.7959368228413007259e+09,'{"prompt_tokens":15,"cached_tokens":10,"completion_tokens":16,"tokens_recomputed":0,"queue_ms":0.3958390000207146,"restore_ms":0.0,"prefill_ms":4.375890999995136,"last":{"prompt_tokens":12,"cached_tokens":10,"completion_tokens":8,"tokens_recomputed":0},"answers":[3,12]}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec73066d05a54df1bfe2b0e12335903b17',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.79593682285011744495e+09,1.79593682287329220771e+09,'{"prompt_tokens":21,"cached_tokens":19,"completion_tokens":8,"tokens_recomputed":0,"queue_ms":0.5124870000372539,"restore_ms":0.0,"prefill_ms":5.669542999953592,"last":{"prompt_tokens":21,"cached_tokens":19,"completion_tokens":8,"tokens_recomputed":0},"answers":[3,12,21]}','ses_18ec730667b4f6a6b573d4a643514a876f17',20,NULL);
INSERT INTO "session" VALUES('ses_18ec730673f6fb21dd6cd974858a03900bf1',NULL,NULL,'{}',2592000,'guaranteed','compute',1.79593682296658372883e+09,1.79593682299939537048e+09,'{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":8,"tokens_recomputed":0,"queue_ms":0.6610010000258626,"restore_ms":0.0,"prefill_ms":4.322397000009914,"last":{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":8,"tokens_recomputed":0},"answers":[3]}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec730678df477a37c2e880bfaacfe38f17',NULL,'conversation 7','{}',86400,'best_effort','compute',1.79593682304895472523e+09,1.79593682306008982658e+09,'{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0,"queue_ms":0.7524220000050263,"restore_ms":0.0,"prefill_ms":7.131237999942641,"last":{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0},"answers":[3]}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec73067b9b2c0f00e255fd1e36962dd293',NULL,'
','{}',86400,'best_effort','compute',1.79593682309478664405e+09,1.79593682310537409779e+09,'{"prompt_tokens":21,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0,"queue_ms":1.223558999981833,"restore_ms":0.0,"prefill_ms":2.4198229999683463,"last":{"prompt_tokens":21,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0},"answers":[21]}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec73067d723c9542bccf413a40308737d6',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.79593682312566637997e+09,1.7959368231256668568e+09,'{"prompt_tokens":0,"cached_tokens":0,"completion_tokens":0,"tokens_recomputed":0,"queue_ms":0.0,"restore_ms":0.0,"prefill_ms":0.0,"last":null,"answers":[]}',NULL,NULL,'ses_18ec73067d723c9542bccf413a40308737d6');
CREATE TABLE tensor (digest BLOB PRIMARY KEY, data BLOB NOT NULL) STRICT;
INSERT INTO "tensor" VALUES(X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0',X'0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F');
CREATE TABLE tokens (
    session TEXT NOT NULL, position INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (session, position)
) STRICT, WITHOUT ROWID;
INSERT INTO "tokens" VALUES('ses_18ec730667b4f6a6b573d4a643514a876f17',0,X'0500000006000000070000001F01000024010000E10100005E01000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec730667b4f6a6b573d4a643514a876f17',11,X'09000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec73066d05a54df1bfe2b0e12335903b17',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec73066d05a54df1bfe2b0e12335903b17',20,X'0B000000E10100005E0100004400000044000000C700000044000000C700000044000000');
INSERT INTO "tokens" VALUES('ses_18ec730673f6fb21dd6cd974858a03900bf1',0,X'0500000006000000070000001101000011010000110100001101000011010000110100001101000011010000');
INSERT INTO "tokens" VALUES('ses_18ec730678df477a37c2e880bfaacfe38f17',0,X'0500000006000000070000001F01000024010000E10100005E010000');
INSERT INTO "tokens" VALUES('ses_18ec73067b9b2c0f00e255fd1e36962dd293',0,X'02010000750000007300000065000000720000000A0000004800000069000000030100000A00000002010000610000007300000073000000690000007300000074000000610000006E000000740000000A000000A5000000380000006E010000AF010000');
INSERT INTO "tokens" VALUES('ses_18ec73067d723c9542bccf413a40308737d6',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
CREATE TABLE vector (
    owner TEXT NOT NULL, name TEXT NOT NULL, dtype TEXT NOT NULL, size INTEGER NOT NULL, tensor BLOB NOT NULL,
    PRIMARY KEY (owner, name)
) STRICT, WITHOUT ROWID;
INSERT INTO "vector" VALUES('','calm','float32',64,X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE INDEX breakpoint_vector_tensor ON breakpoint_vector (tensor) WHERE tensor IS NOT NULL;
CREATE TRIGGER breakpoint_vector_deleted AFTER DELETE ON breakpoint_vector BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM vector WHERE tensor = old.tensor); END;
CREATE TRIGGER breakpoint_vector_changed AFTER UPDATE OF tensor ON breakpoint_vector WHEN old.tensor IS NOT new.tensor BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM vector WHERE tensor = old.tensor); END;
CREATE INDEX intervention_tensor ON intervention (tensor) WHERE tensor IS NOT NULL;
CREATE TRIGGER intervention_deleted AFTER DELETE ON intervention BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM vector WHERE tensor = old.tensor); END;
CREATE TRIGGER intervention_changed AFTER UPDATE OF tensor ON intervention WHEN old.tensor IS NOT new.tensor BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM vector WHERE tensor = old.tensor); END;
CREATE INDEX vector_tensor ON vector (tensor) WHERE tensor IS NOT NULL;
CREATE TRIGGER vector_deleted AFTER DELETE ON vector BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM vector WHERE tensor = old.tensor); END;
CREATE TRIGGER vector_changed AFTER UPDATE OF tensor ON vector WHEN old.tensor IS NOT new.tensor BEGIN DELETE FROM tensor WHERE digest = old.tensor AND NOT EXISTS (SELECT 1 FROM breakpoint_vector WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM intervention WHERE tensor = old.tensor) AND NOT EXISTS (SELECT 1 FROM vector WHERE tensor = old.tensor); END;
CREATE INDEX response_of_session ON response (session);
CREATE INDEX home_seq ON home (seq);
CREATE INDEX response_gone_seq ON response_gone (seq);
CREATE INDEX keyed_request_session ON keyed_request (session);
CREATE INDEX keyed_request_at ON keyed_request (owner, at);
COMMIT;
PRAGMA user_version = 10;
