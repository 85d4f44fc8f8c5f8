BEGIN TRANSACTION;
CREATE TABLE api_key (name TEXT PRIMARY KEY, salt BLOB NOT NULL, digest BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE breakpoint_vector (
    session TEXT NOT NULL, tensor BLOB NOT NULL, PRIMARY KEY (session, tensor)
) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoint_vector" VALUES('ses_18ec782c8ff5182fb18725d128abbb154ece',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE breakpoints (session TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoints" VALUES('ses_18ec782c8ff5182fb18725d128abbb154ece','[{"id":"bp_872ce0b7760ae2e4","layers":[0],"action":"edit","when":{"in_pass":"any","position":null,"token_id":null,"every":null},"edits":[{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null}],"once":false,"timeout_s":600.0,"on_timeout":"resume"}]');
CREATE TABLE home (
    session TEXT PRIMARY KEY, state TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, peer TEXT NOT NULL,
    peer_seq INTEGER NOT NULL, owner TEXT, name TEXT, peer_journal TEXT NOT NULL DEFAULT ''
) STRICT, WITHOUT ROWID;
CREATE TABLE identity (
    id INTEGER PRIMARY KEY CHECK (id = 1), uuid TEXT NOT NULL, starts INTEGER NOT NULL, attempt TEXT NOT NULL
) STRICT;
INSERT INTO "identity" VALUES(1,'176cdbdb-062f-44cc-a5ac-f8e284f29761',0,'');
CREATE TABLE intervention (
    session TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, tensor BLOB, PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;
INSERT INTO "intervention" VALUES('ses_18ec782c8ff5182fb18725d128abbb154ece',0,'[{"first":0,"end":10,"boundary":1,"edit":{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null},"only":[]}]',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE keyed_request (
    owner TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL, at REAL NOT NULL, session TEXT NOT NULL,
    response TEXT, turn TEXT, token_ids BLOB, PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE model (name TEXT NOT NULL, vocab_size INTEGER NOT NULL, layers INTEGER NOT NULL, hidden INTEGER NOT NULL)
STRICT;
INSERT INTO "model" VALUES('tiny-llama',512,4,64);
CREATE TABLE proof (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
CREATE TABLE response (id TEXT PRIMARY KEY, session TEXT NOT NULL, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "response" VALUES('resp_bb4997fa9d905a744dfad8fcf73fb850','ses_18ec782cffcc630d61219e62a55b6a576b27','{"conversation":"resp_bb4997fa9d905a744dfad8fcf73fb850","owns_session":true,"start":0,"before":[],"input":[{"id":"msg_381b676f8d17b3e7df7c1fd9c58b1562","type":"message","role":"user","content":[{"type":"input_text","text":"Hi"}],"status":"completed"}],"answer":{"id":"resp_bb4997fa9d905a744dfad8fcf73fb850","object":"response","created_at":1795942486,"completed_at":null,"status":"incomplete","background":false,"error":null,"incomplete_details":{"reason":"max_output_tokens"},"instructions":null,"max_output_tokens":4,"model":"tiny-llama","output":[{"id":"msg_09ecee7229ba484b9d2145c446391538","type":"message","role":"assistant","content":[{"type":"output_text","text":"U<389>�<460>","annotations":[],"logprobs":[]}],"status":"incomplete"}],"parallel_tool_calls":true,"previous_response_id":null,"conversation":null,"store":true,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,"truncation":"disabled","usage":{"input_tokens":21,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":21},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":25},"user":null,"metadata":{}},"is_deleted":false,"removed":[]}');
CREATE TABLE response_gone (response TEXT PRIMARY KEY, session TEXT NOT NULL, seq INTEGER NOT NULL)
STRICT, WITHOUT ROWID;
CREATE TABLE session (
    id TEXT PRIMARY KEY, owner TEXT, name TEXT, metadata TEXT NOT NULL, ttl_s INTEGER, residency TEXT NOT NULL,
    phase TEXT NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL, usage TEXT NOT NULL,
    forked_from TEXT, forked_tokens INTEGER, namespace TEXT,
    adapter TEXT, adapter_digest TEXT
) STRICT, WITHOUT ROWID;
INSERT INTO "session" VALUES('ses_18ec782c39433c6244aec3a73b46e84e84f9',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','idle',1.79594248274865770339e+09,1.79594248378947806354e+09,'{"prompt_tokens":15,"cached_tokens":10,"completion_tokens":16,"tokens_recomputed":0,"queue_ms":0.7182859999375069,"restore_ms":0.0,"prefill_ms":30.54449299997941,"last":{"prompt_tokens":12,"cached_tokens":10,"completion_tokens":8,"tokens_recomputed":0},"answers":[3,12]}',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec782c786a35122a8d671cd43723b58582',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.79594248380817699426e+09,1.79594248398145842548e+09,'{"prompt_tokens":21,"cached_tokens":19,"completion_tokens":8,"tokens_recomputed":0,"queue_ms":0.6639509992965031,"restore_ms":0.0,"prefill_ms":8.93568000083178,"last":{"prompt_tokens":21,"cached_tokens":19,"completion_tokens":8,"tokens_recomputed":0},"answers":[3,12,21]}','ses_18ec782c39433c6244aec3a73b46e84e84f9',20,NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec782c8ff5182fb18725d128abbb154ece',NULL,NULL,'{}',2592000,'guaranteed','compute',1.79594248420315170285e+09,1.79594248468145418172e+09,'{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":8,"tokens_recomputed":0,"queue_ms":1.4199900006133248,"restore_ms":0.0,"prefill_ms":14.40586999979132,"last":{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":8,"tokens_recomputed":0},"answers":[3]}',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec782cb3adc3553679eee837943baa5a44',NULL,'conversation 7','{}',86400,'best_effort','compute',1.79594248480244946474e+09,1.7959424852976322174e+09,'{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0,"queue_ms":1.6979820002234192,"restore_ms":0.0,"prefill_ms":124.9761959998068,"last":{"prompt_tokens":3,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0},"answers":[3]}',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec782cffcc630d61219e62a55b6a576b27',NULL,'
','{}',86400,'best_effort','compute',1.79594248607952308651e+09,1.79594248641353607174e+09,'{"prompt_tokens":21,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0,"queue_ms":1.5614779995303252,"restore_ms":0.0,"prefill_ms":127.64028000037797,"last":{"prompt_tokens":21,"cached_tokens":0,"completion_tokens":4,"tokens_recomputed":0},"answers":[21]}',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec782d1700a6ad174c69be28aa43825a04',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.79594248646883702276e+09,1.79594248646883797642e+09,'{"prompt_tokens":0,"cached_tokens":0,"completion_tokens":0,"tokens_recomputed":0,"queue_ms":0.0,"restore_ms":0.0,"prefill_ms":0.0,"last":null,"answers":[]}',NULL,NULL,'ses_18ec782d1700a6ad174c69be28aa43825a04',NULL,NULL);
CREATE TABLE tensor (digest BLOB PRIMARY KEY, data BLOB NOT NULL) STRICT;
INSERT INTO "tensor" VALUES(X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0',X'0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F');
CREATE TABLE tokens (
    session TEXT NOT NULL, position INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (session, position)
) STRICT, WITHOUT ROWID;
INSERT INTO "tokens" VALUES('ses_18ec782c39433c6244aec3a73b46e84e84f9',0,X'0500000006000000070000001F01000024010000E10100005E01000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec782c39433c6244aec3a73b46e84e84f9',11,X'09000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec782c786a35122a8d671cd43723b58582',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec782c786a35122a8d671cd43723b58582',20,X'0B000000E10100005E0100004400000044000000C700000044000000C700000044000000');
INSERT INTO "tokens" VALUES('ses_18ec782c8ff5182fb18725d128abbb154ece',0,X'0500000006000000070000001101000011010000110100001101000011010000110100001101000011010000');
INSERT INTO "tokens" VALUES('ses_18ec782cb3adc3553679eee837943baa5a44',0,X'0500000006000000070000001F01000024010000E10100005E010000');
INSERT INTO "tokens" VALUES('ses_18ec782cffcc630d61219e62a55b6a576b27',0,X'02010000750000007300000065000000720000000A0000004800000069000000030100000A00000002010000610000007300000073000000690000007300000074000000610000006E000000740000000A00000055000000850100008B000000CC010000');
INSERT INTO "tokens" VALUES('ses_18ec782d1700a6ad174c69be28aa43825a04',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
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
