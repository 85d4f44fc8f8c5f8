BEGIN TRANSACTION;
CREATE TABLE api_key (name TEXT PRIMARY KEY, salt BLOB NOT NULL, digest BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE breakpoint_vector (
    session TEXT NOT NULL, tensor BLOB NOT NULL, PRIMARY KEY (session, tensor)
) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoint_vector" VALUES('ses_18ec458b53f406dba774159b99ef1f980674',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE breakpoints (session TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoints" VALUES('ses_18ec458b53f406dba774159b99ef1f980674','[{"id":"bp_d4e7e5731ad3d81d","layers":[0],"action":"edit","when":{"in_pass":"any","position":null,"token_id":null,"every":null},"edits":[{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null}],"once":false,"timeout_s":600.0,"on_timeout":"resume"}]');
CREATE TABLE home (
    session TEXT PRIMARY KEY, state TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, peer TEXT NOT NULL,
    peer_seq INTEGER NOT NULL, owner TEXT, name TEXT
) STRICT, WITHOUT ROWID;
CREATE TABLE intervention (
    session TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, tensor BLOB, PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;
INSERT INTO "intervention" VALUES('ses_18ec458b53f406dba774159b99ef1f980674',0,'[{"first":0,"end":10,"boundary":1,"edit":{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null},"only":[]}]',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE keyed_request (
    owner TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL, at REAL NOT NULL, session TEXT NOT NULL,
    response TEXT, turn TEXT, token_ids BLOB, PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE model (name TEXT NOT NULL, vocab_size INTEGER NOT NULL, layers INTEGER NOT NULL, hidden INTEGER NOT NULL)
STRICT;
INSERT INTO "model" VALUES('tiny-llama',512,4,64);
CREATE TABLE proof (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
CREATE TABLE response (id TEXT PRIMARY KEY, session TEXT NOT NULL, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "response" VALUES('resp_57ee2e1ac8a1efed96257fca6aff5096','ses_18ec458b5d2477cd4263233971ba21359e6f','{"conversation":"resp_57ee2e1ac8a1efed96257fca6aff5096","owns_session":true,"start":0,"before":[],"input":[{"id":"msg_e99ed50800de26e88496be66576f0b0d","type":"message","role":"user","content":[{"type":"input_text","text":"Hi"}],"status":"completed"}],"answer":{"id":"resp_57ee2e1ac8a1efed96257fca6aff5096","object":"response","created_at":1795886816,"completed_at":null,"status":"incomplete","background":false,"error":null,"incomplete_details":{"reason":"max_output_tokens"},"instructions":null,"max_output_tokens":4,"model":"tiny-llama","output":[{"id":"msg_1be762996b1df3decafc97c3a3b57e54","type":"message","role":"assistant","content":[{"type":"output_text","text":"�<316>�<437>","annotations":[],"logprobs":[]}],"status":"incomplete"}],"parallel_tool_calls":true,"previous_response_id":null,"store":true,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,"truncation":"disabled","usage":{"input_tokens":21,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":21},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":25},"user":null,"metadata":{}},"is_deleted":false}');
CREATE TABLE response_gone (response TEXT PRIMARY KEY, session TEXT NOT NULL, seq INTEGER NOT NULL)
STRICT, WITHOUT ROWID;
CREATE TABLE session (
    id TEXT PRIMARY KEY, owner TEXT, name TEXT, metadata TEXT NOT NULL, ttl_s INTEGER, residency TEXT NOT NULL,
    phase TEXT NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL, usage TEXT NOT NULL,
    forked_from TEXT, forked_tokens INTEGER, namespace TEXT
) STRICT, WITHOUT ROWID;
INSERT INTO "session" VALUES('ses_18ec458b3978102c434d4c304e7c1afa4e49',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','idle',1.79588681568098330497e+09,1.79588681582896137235e+09,'{"prompt_tokens": 15, "cached_tokens": 10, "completion_tokens": 16, "tokens_recomputed": 0, "queue_ms": 0.5408919969340786, "restore_ms": 0.0, "prefill_ms": 3.3173970005009323, "last": {"prompt_tokens": 12, "cached_tokens": 10, "completion_tokens": 8, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec458b42c5787206486973c60aad104c5a',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.7958868158370354176e+09,1.79588681587053179741e+09,'{"prompt_tokens": 21, "cached_tokens": 19, "completion_tokens": 8, "tokens_recomputed": 0, "queue_ms": 0.5865499988431111, "restore_ms": 0.0, "prefill_ms": 4.102992003026884, "last": {"prompt_tokens": 21, "cached_tokens": 19, "completion_tokens": 8, "tokens_recomputed": 0}}','ses_18ec458b3978102c434d4c304e7c1afa4e49',20,NULL);
INSERT INTO "session" VALUES('ses_18ec458b53f406dba774159b99ef1f980674',NULL,NULL,'{}',2592000,'guaranteed','compute',1.79588681612543177605e+09,1.79588681614810395234e+09,'{"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 8, "tokens_recomputed": 0, "queue_ms": 0.7266379980137572, "restore_ms": 0.0, "prefill_ms": 2.722576005908195, "last": {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 8, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec458b5672ea3cd9240b4ed5bf99454cbc',NULL,'conversation 7','{}',86400,'best_effort','compute',1.79588681616717410092e+09,1.79588681617256832124e+09,'{"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0, "queue_ms": 0.5148030031705275, "restore_ms": 0.0, "prefill_ms": 2.18461799522629, "last": {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec458b5d2477cd4263233971ba21359e6f',NULL,'
','{}',86400,'best_effort','compute',1.79588681627947211261e+09,1.79588681628603029252e+09,'{"prompt_tokens": 21, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0, "queue_ms": 0.8368700000573881, "restore_ms": 0.0, "prefill_ms": 2.3890119991847314, "last": {"prompt_tokens": 21, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18ec458b5e2a8c125e27b4b9b9e324b93b38',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.79588681629664516448e+09,1.79588681629664540287e+09,'{"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "tokens_recomputed": 0, "queue_ms": 0.0, "restore_ms": 0.0, "prefill_ms": 0.0, "last": null}',NULL,NULL,'ses_18ec458b5e2a8c125e27b4b9b9e324b93b38');
CREATE TABLE tensor (digest BLOB PRIMARY KEY, data BLOB NOT NULL) STRICT;
INSERT INTO "tensor" VALUES(X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0',X'0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F');
CREATE TABLE tokens (
    session TEXT NOT NULL, position INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (session, position)
) STRICT, WITHOUT ROWID;
INSERT INTO "tokens" VALUES('ses_18ec458b3978102c434d4c304e7c1afa4e49',0,X'0500000006000000070000001F01000024010000E10100005E01000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec458b3978102c434d4c304e7c1afa4e49',11,X'09000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec458b42c5787206486973c60aad104c5a',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18ec458b42c5787206486973c60aad104c5a',20,X'0B000000E10100005E0100004400000044000000C700000044000000C700000044000000');
INSERT INTO "tokens" VALUES('ses_18ec458b53f406dba774159b99ef1f980674',0,X'0500000006000000070000001101000011010000110100001101000011010000110100001101000011010000');
INSERT INTO "tokens" VALUES('ses_18ec458b5672ea3cd9240b4ed5bf99454cbc',0,X'0500000006000000070000001F01000024010000E10100005E010000');
INSERT INTO "tokens" VALUES('ses_18ec458b5d2477cd4263233971ba21359e6f',0,X'02010000750000007300000065000000720000000A0000004800000069000000030100000A00000002010000610000007300000073000000690000007300000074000000610000006E000000740000000A0000008C0000003C010000D8000000B5010000');
INSERT INTO "tokens" VALUES('ses_18ec458b5e2a8c125e27b4b9b9e324b93b38',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
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
PRAGMA user_version = 9;
