BEGIN TRANSACTION;
CREATE TABLE breakpoint_vector (
    session TEXT NOT NULL, tensor BLOB NOT NULL, PRIMARY KEY (session, tensor)
) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoint_vector" VALUES('ses_18eb7ded166a37f689de9b90ea1c180cfb16',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE breakpoints (session TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "breakpoints" VALUES('ses_18eb7ded166a37f689de9b90ea1c180cfb16','[{"id":"bp_0fd3ed44d0e97121","layers":[0],"action":"edit","when":{"in_pass":"any","position":null,"token_id":null,"every":null},"edits":[{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null}],"once":false,"timeout_s":600.0,"on_timeout":"resume"}]');
CREATE TABLE home (
    session TEXT PRIMARY KEY, state TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, peer TEXT NOT NULL,
    peer_seq INTEGER NOT NULL, owner TEXT, name TEXT
) STRICT, WITHOUT ROWID;
CREATE TABLE intervention (
    session TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, tensor BLOB, PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;
INSERT INTO "intervention" VALUES('ses_18eb7ded166a37f689de9b90ea1c180cfb16',0,'[{"first":0,"end":10,"boundary":1,"edit":{"op":"add","factor":4.0,"vector":{"dtype":"float32","shape":[64],"data":"P2_vxo5TIZJyLHnKYiiHygTN2ebAADRZU0So1ackPrA="},"positions":{"first":0,"end":null,"last":false},"max_norm":null},"only":[]}]',X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0');
CREATE TABLE model (name TEXT NOT NULL, vocab_size INTEGER NOT NULL, layers INTEGER NOT NULL, hidden INTEGER NOT NULL)
STRICT;
INSERT INTO "model" VALUES('tiny-llama',512,4,64);
CREATE TABLE proof (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
CREATE TABLE response (id TEXT PRIMARY KEY, session TEXT NOT NULL, body TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "response" VALUES('resp_ea6c4d12887722fc41fc5fc0d1492d34','ses_18eb7ded2b06da00e98a5622d8f751af922a','{"conversation":"resp_ea6c4d12887722fc41fc5fc0d1492d34","owns_session":true,"start":0,"before":[],"input":[{"id":"msg_580b47b82568d5a8458795c6477046a0","type":"message","role":"user","content":[{"type":"input_text","text":"Hi"}],"status":"completed"}],"answer":{"id":"resp_ea6c4d12887722fc41fc5fc0d1492d34","object":"response","created_at":1795667334,"completed_at":null,"status":"incomplete","background":false,"error":null,"incomplete_details":{"reason":"max_output_tokens"},"instructions":null,"max_output_tokens":4,"model":"tiny-llama","output":[{"id":"msg_748a848f619b9d2904231c2b9cc1269a","type":"message","role":"assistant","content":[{"type":"output_text","text":"''G�","annotations":[],"logprobs":[]}],"status":"incomplete"}],"parallel_tool_calls":true,"previous_response_id":null,"store":true,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],"top_logprobs":0,"top_p":1.0,"truncation":"disabled","usage":{"input_tokens":21,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":21},"output_tokens":4,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":25},"user":null,"metadata":{}},"is_deleted":false}');
CREATE TABLE response_gone (response TEXT PRIMARY KEY, session TEXT NOT NULL, seq INTEGER NOT NULL)
STRICT, WITHOUT ROWID;
CREATE TABLE session (
    id TEXT PRIMARY KEY, owner TEXT, name TEXT, metadata TEXT NOT NULL, ttl_s INTEGER, residency TEXT NOT NULL,
    phase TEXT NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL, usage TEXT NOT NULL,
    forked_from TEXT, forked_tokens INTEGER, namespace TEXT
) STRICT, WITHOUT ROWID;
INSERT INTO "session" VALUES('ses_18eb7decd20873129581c3c884f095b73ba9',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','idle',1.79566733252685761454e+09,1.79566733343889427189e+09,'{"prompt_tokens": 15, "cached_tokens": 10, "completion_tokens": 16, "tokens_recomputed": 0, "queue_ms": 0.6226830000741757, "restore_ms": 0.0, "prefill_ms": 23.55169200018281, "last": {"prompt_tokens": 12, "cached_tokens": 10, "completion_tokens": 8, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18eb7ded08bfe0749042b650aa4f03bad3cf',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.7956673334448177814e+09,1.7956673335180585384e+09,'{"prompt_tokens": 21, "cached_tokens": 19, "completion_tokens": 8, "tokens_recomputed": 0, "queue_ms": 0.6597980000151438, "restore_ms": 0.0, "prefill_ms": 45.66320999992968, "last": {"prompt_tokens": 21, "cached_tokens": 19, "completion_tokens": 8, "tokens_recomputed": 0}}','ses_18eb7decd20873129581c3c884f095b73ba9',20,NULL);
INSERT INTO "session" VALUES('ses_18eb7ded166a37f689de9b90ea1c180cfb16',NULL,NULL,'{}',2592000,'guaranteed','compute',1.79566733367408633229e+09,1.79566733389225172993e+09,'{"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 8, "tokens_recomputed": 0, "queue_ms": 3.2983750002131274, "restore_ms": 0.0, "prefill_ms": 52.82765499987363, "last": {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 8, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18eb7ded26b1157c52df45726e97975487d0',NULL,'conversation 7','{}',86400,'best_effort','compute',1.79566733394717025756e+09,1.79566733398438596724e+09,'{"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0, "queue_ms": 1.6846979997353628, "restore_ms": 0.0, "prefill_ms": 23.686351999913313, "last": {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18eb7ded2b06da00e98a5622d8f751af922a',NULL,'
','{}',86400,'best_effort','compute',1.79566733401990222935e+09,1.79566733412966918941e+09,'{"prompt_tokens": 21, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0, "queue_ms": 3.2355260000258568, "restore_ms": 0.0, "prefill_ms": 69.36581599984493, "last": {"prompt_tokens": 21, "cached_tokens": 0, "completion_tokens": 4, "tokens_recomputed": 0}}',NULL,NULL,NULL);
INSERT INTO "session" VALUES('ses_18eb7ded3343e8e0b266aab5e6e5a8696e7f',NULL,NULL,'{"name": "plain"}',2592000,'best_effort','compute',1.79566733415811967842e+09,1.79566733415812039382e+09,'{"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0, "tokens_recomputed": 0, "queue_ms": 0.0, "restore_ms": 0.0, "prefill_ms": 0.0, "last": null}',NULL,NULL,'ses_18eb7ded3343e8e0b266aab5e6e5a8696e7f');
CREATE TABLE tensor (digest BLOB PRIMARY KEY, data BLOB NOT NULL) STRICT;
INSERT INTO "tensor" VALUES(X'3F6FEFC68E532192722C79CA622887CA04CDD9E6C00034595344A8D5A7243EB0',X'0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F0000003F');
CREATE TABLE tokens (
    session TEXT NOT NULL, position INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (session, position)
) STRICT, WITHOUT ROWID;
INSERT INTO "tokens" VALUES('ses_18eb7decd20873129581c3c884f095b73ba9',0,X'0500000006000000070000001F01000024010000E10100005E01000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18eb7decd20873129581c3c884f095b73ba9',11,X'09000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18eb7ded08bfe0749042b650aa4f03bad3cf',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
INSERT INTO "tokens" VALUES('ses_18eb7ded08bfe0749042b650aa4f03bad3cf',20,X'0B000000E10100005E0100004400000044000000C700000044000000C700000044000000');
INSERT INTO "tokens" VALUES('ses_18eb7ded166a37f689de9b90ea1c180cfb16',0,X'0500000006000000070000001101000011010000110100001101000011010000110100001101000011010000');
INSERT INTO "tokens" VALUES('ses_18eb7ded26b1157c52df45726e97975487d0',0,X'0500000006000000070000001F01000024010000E10100005E010000');
INSERT INTO "tokens" VALUES('ses_18eb7ded2b06da00e98a5622d8f751af922a',0,X'02010000750000007300000065000000720000000A0000004800000069000000030100000A00000002010000610000007300000073000000690000007300000074000000610000006E000000740000000A0000002700000047000000E100000095000000');
INSERT INTO "tokens" VALUES('ses_18eb7ded3343e8e0b266aab5e6e5a8696e7f',0,X'0500000006000000070000001F01000024010000E10100005E0100004400000044000000440000004400000009000000CD01000001000000440000004400000044000000440000004400000044000000');
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
COMMIT;
PRAGMA user_version = 8;
