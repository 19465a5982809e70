PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE chatflow_messages (
                    id INTEGER PRIMARY KEY AUTOINCREMENT,
                    session_id TEXT NOT NULL,
                    role TEXT NOT NULL,
                    content TEXT,
                    message_json TEXT NOT NULL,
                    created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
                    FOREIGN KEY(session_id) REFERENCES chatflow_sessions(session_id) ON DELETE CASCADE
                );
INSERT INTO "chatflow_messages" VALUES(1,'whole','system','Be brief.','{"role":"system","content":"Be brief.","tool_calls":null,"tool_results":null,"timestamp":"2026-03-01T12:00:00.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(2,'whole','user','¿Dónde está 404?','{"role":"user","content":"¿Dónde está 404?","tool_calls":null,"tool_results":null,"timestamp":"2026-03-01T12:00:01.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(3,'whole','model',NULL,'{"role":"model","content":null,"tool_calls":[{"id":"a","name":"look","args":{"of":"a","deep":{"$chatflow":1}}},{"id":"b","name":"look","args":{"of":"b","deep":{"$chatflow":1}}}],"tool_results":null,"timestamp":"2026-03-01T12:00:02.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(4,'whole','tool',NULL,'{"role":"tool","content":null,"tool_calls":null,"tool_results":[{"tool_call_id":"a","name":"look","content":{"$chatflow":[1,null]},"is_error":false},{"tool_call_id":"b","name":"look","content":{"$chatflow":[1,null]},"is_error":false}],"timestamp":"2026-03-01T12:00:03.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(5,'whole','model','Mañana.','{"role":"model","content":"Mañana.","tool_calls":null,"tool_results":null,"timestamp":"2026-03-01T12:00:04.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(6,'whole','user','Gracias','{"role":"user","content":"Gracias","tool_calls":null,"tool_results":null,"timestamp":"2026-03-01T12:00:05.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(7,'broken','model','Hello first','{"role":"model","content":"Hello first","tool_calls":null,"tool_results":null,"timestamp":"2026-03-01T12:00:00.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(8,'broken','tool',NULL,'{"role":"tool","content":null,"tool_calls":null,"tool_results":[{"tool_call_id":"x","name":"look","content":{"$chatflow":[1,null]},"is_error":false}],"timestamp":"2026-03-01T12:00:00.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(9,'broken','user','hello','{"role":"user","content":"hello","tool_calls":null,"tool_results":null,"timestamp":"2026-03-01T12:00:00.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(10,'broken','tool',NULL,'{"role":"tool","content":null,"tool_calls":null,"tool_results":[{"tool_call_id":"never called","name":"look","content":{"$chatflow":[1,null]},"is_error":false}],"timestamp":"2026-03-01T12:00:01.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(11,'broken','model',NULL,'{"role":"model","content":null,"tool_calls":[{"id":"c","name":"look","args":{"of":"c","deep":{"$chatflow":1}}},{"id":"unanswered","name":"look","args":{"of":"unanswered","deep":{"$chatflow":1}}}],"tool_results":null,"timestamp":"2026-03-01T12:00:02.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(12,'broken','tool',NULL,'{"role":"tool","content":null,"tool_calls":null,"tool_results":[{"tool_call_id":"c","name":"look","content":{"$chatflow":[1,null]},"is_error":false},{"tool_call_id":"nor this","name":"look","content":{"$chatflow":[1,null]},"is_error":false}],"timestamp":"2026-03-01T12:00:03.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(13,'broken','system','Late.','{"role":"system","content":"Late.","tool_calls":null,"tool_results":null,"timestamp":"2026-03-01T12:00:04.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(14,'broken','tool','a tool without results','{"role":"tool","content":"a tool without results","tool_calls":null,"tool_results":null,"timestamp":"2026-03-01T12:00:05.250000Z"}','2026-11-30 20:42:34');
INSERT INTO "chatflow_messages" VALUES(15,'gone','user','too late','{"role":"user","content":"too late","tool_calls":null,"tool_results":null,"timestamp":"2026-03-01T12:00:00.250000Z"}','2026-11-30 20:42:34');
CREATE TABLE chatflow_processed_messages (
                    message_id TEXT PRIMARY KEY,
                    processed_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP
                );
INSERT INTO "chatflow_processed_messages" VALUES('wamid.1','2026-11-30 20:42:34');
INSERT INTO "chatflow_processed_messages" VALUES('wamid.2','2026-11-30 20:42:34');
CREATE TABLE chatflow_sessions (
                    session_id TEXT PRIMARY KEY,
                    active_agent_name TEXT NOT NULL,
                    metadata_json TEXT NOT NULL DEFAULT '{}',
                    created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
                    updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP
                );
INSERT INTO "chatflow_sessions" VALUES('whole','Billing','{"channel": "whatsapp", "nested": {"\u00f1": [1, 2.5, null]}}','2026-11-30 20:42:34','2026-11-30 20:42:34');
INSERT INTO "chatflow_sessions" VALUES('broken','Support','{}','2026-11-30 20:42:34','2026-11-30 20:42:34');
INSERT INTO "chatflow_sessions" VALUES('empty','Billing','{"vip": true}','2026-11-30 20:42:34','2026-11-30 20:42:34');
CREATE INDEX idx_chatflow_messages_session ON chatflow_messages(session_id, id);
CREATE INDEX idx_chatflow_processed_at ON chatflow_processed_messages(processed_at);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('chatflow_messages',15);
COMMIT;
