BEGIN TRANSACTION;
CREATE TABLE breakpoint_vector (
    session TEXT NOT NULL, tensor BLOB NOT NULL, PRIMARY KEY (session, tensor)
) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoint_vector" VALUES('ses_18eb50b817ae2cb111d24dc555221acc0c8b',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE breakpoints (session TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoints" VALUES('ses_18eb50b817ae2cb111d24dc555221acc0c8b','[{"id":"bp_f2caf8fd221f4e94","layers":[0],"action":"edit","when":{"in_pass":"any","position":null,"token_id":null,"every":null},"edits":[{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null}],"once":false,"timeout_s":600.0,"on_timeout":"resume"}]');
CREATE TABLE intervention (
    session TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, tensor BLOB, PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;
INSERT INTO "intervention" VALUES('ses_18eb50b817ae2cb111d24dc555221acc0c8b',0,'[{"first":0,"end":10,"boundary":1,"edit":{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null},"only":[]}]',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE model (name TEXT NOT NULL, vocab_size INTEGER NOT NULL, layers INTEGER NOT NULL, hidden INTEGER NOT NULL)
STRICT;
INSERT INTO "model" VALUES('tiny-llama',512,4,64);
CREATE TABLE proof (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
CREATE TABLE response (id TEXT PRIMARY KEY, session TEXT NOT NULL, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "response" VALUES('resp_007305616a0c5efd18941993979090f0','ses_18eb50b81e35899a9b7946339c4b72477f1a','{"conversation":"resp_007305616a0c5efd18941993979090f0","owns_session":true,"start":0,"before":[],"input":[{"id":"msg_d952980156fa224e849632d220b111cf","type":"message","role":"user","content":[{"type":"input_text","text":"Hi"}],"status":"completed"}],"answer":{"id":"resp_007305616a0c5efd18941993979090f0","object":"response","created_at":1795617628,"completed_at":null,"status":"incomplete","background":false,"error":null,"incomplete_details":{"reason":"max_output_tokens"},"instructions":null,"max_output_tokens":4,"model":"tiny-llama","output":[{"id":"msg_8921401aa63e4ba8bb34cb27a908b461","type":"message","role":"assistant","content":[{"type":"output_text","text":"<490>�u^","annotations":[],"logprobs":[]}],"status":"incomplete"}],"parallel_tool_calls":true,"previous_response_id":null,"store":true,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,"truncation":"disabled","usage":{"input_tokens":21,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":21},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":25},"user":null,"metadata":{}},"is_deleted":false}');
CREATE TABLE session (
    id TEXT PRIMARY KEY, owner TEXT, name TEXT, metadata TEXT NOT NULL, ttl_s INTEGER, residency TEXT NOT NULL,
    phase TEXT NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL, usage TEXT NOT NULL,
    forked_from TEXT, forked_tokens INTEGER, namespace TEXT
) STRICT, WITHOUT ROWID;
INSERT INTO "session" VALUES('ses_18eb50b7ed4a5293d3208b527fd6b6e0bdff',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','idle',1.79561762732765030857e+09,1.79561762787444424626e+09,'{"prompt_tokens": 15, "cached_tokens": 10, "completion_tokens": 16, "tokens_recomputed": 0, "queue_ms": 0.6515999998555344, "restore_ms": 0.0, "prefill_ms": 8.87509999984104, "last": {"prompt_tokens": 12, "cached_tokens": 10, "completion_tokens": 8, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18eb50b80e5ed408988564501a6a27cd6ad0',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.79561762788261199e+09,1.79561762791497445102e+09,'{"prompt_tokens": 21, "cached_tokens": 19, "completion_tokens": 8, "tokens_recomputed": 0, "queue_ms": 0.5870429999959015, "restore_ms": 0.0, "prefill_ms": 6.074461999560299, "last": {"prompt_tokens": 21, "cached_tokens": 19, "completion_tokens": 8, "tokens_recomputed": 0}}','ses_18eb50b7ed4a5293d3208b527fd6b6e0bdff',20,NULL);
INSERT INTO "session" VALUES('ses_18eb50b817ae2cb111d24dc555221acc0c8b',NULL,NULL,'{}',2592000,'guaranteed','compute',1.7956176280387985706e+09,1.79561762808198666571e+09,'{"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 8, "tokens_recomputed": 0, "queue_ms": 0.778067999817722, "restore_ms": 0.0, "prefill_ms": 7.117394000033528, "last": {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 8, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18eb50b81c183de2142a77a5b313b74a7fb9',NULL,'conversation 7','{}',86400,'best_effort','compute',1.79561762811286926267e+09,1.79561762812175917621e+09,'{"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0, "queue_ms": 0.6524220002575021, "restore_ms": 0.0, "prefill_ms": 6.956923999950959, "last": {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18eb50b81e35899a9b7946339c4b72477f1a',NULL,'
','{}',86400,'best_effort','compute',1.79561762814835643772e+09,1.79561762815964365011e+09,'{"prompt_tokens": 21, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0, "queue_ms": 1.2421780002114247, "restore_ms": 0.0, "prefill_ms": 6.5620569998827705, "last": {"prompt_tokens": 21, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18eb50b820618374ec88da49aed9df8f99dd',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.79561762818479084963e+09,1.79561762818479132659e+09,'{"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "tokens_recomputed": 0, "queue_ms": 0.0, "restore_ms": 0.0, "prefill_ms": 0.0, "last": null}',NULL,NULL,'ses_18eb50b820618374ec88da49aed9df8f99dd');
CREATE TABLE tensor (digest BLOB PRIMARY KEY, data BLOB NOT NULL) STRICT;
INSERT INTO "tensor" VALUES(X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0',X'0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F');
CREATE TABLE tokens (
    session TEXT NOT NULL, position INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (session, position)
) STRICT, WITHOUT ROWID;
INSERT INTO "tokens" VALUES('ses_18eb50b7ed4a5293d3208b527fd6b6e0bdff',0,X'0500000006000000070000001F01000024010000E10100005E01000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18eb50b7ed4a5293d3208b527fd6b6e0bdff',11,X'09000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18eb50b80e5ed408988564501a6a27cd6ad0',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18eb50b80e5ed408988564501a6a27cd6ad0',20,X'0B000000E10100005E0100004400000044000000C700000044000000C700000044000000');
INSERT INTO "tokens" VALUES('ses_18eb50b817ae2cb111d24dc555221acc0c8b',0,X'0500000006000000070000001101000011010000110100001101000011010000110100001101000011010000');
INSERT INTO "tokens" VALUES('ses_18eb50b81c183de2142a77a5b313b74a7fb9',0,X'0500000006000000070000001F01000024010000E10100005E010000');
INSERT INTO "tokens" VALUES('ses_18eb50b81e35899a9b7946339c4b72477f1a',0,X'02010000750000007300000065000000720000000A0000004800000069000000030100000A00000002010000610000007300000073000000690000007300000074000000610000006E000000740000000A000000EA010000D1000000750000005E000000');
INSERT INTO "tokens" VALUES('ses_18eb50b820618374ec88da49aed9df8f99dd',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
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
COMMIT;
PRAGMA user_version = 6;
