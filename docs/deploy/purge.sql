-- Deletes what passed through a SuperLink of Flower 1.41 to 1.43: models, messages, app bundles and logs.
-- Nodes and the list of runs stay. Stop all runs and the SuperLink, then, as the database's user:
--   sqlite3 /var/lib/flower/superlink.db < purge.sql
.bail on
PRAGMA secure_delete = ON;
-- Fails while a SuperLink has the database.
PRAGMA journal_mode = DELETE;
BEGIN EXCLUSIVE;
DELETE FROM objects;
DELETE FROM object_children;
DELETE FROM run_objects;
DELETE FROM object_push_sessions;
DELETE FROM object_push_session_roots;
DELETE FROM object_push_session_pending;
DELETE FROM nonce_store;
DELETE FROM message_ins;
DELETE FROM message_res;
DELETE FROM message;
DELETE FROM task_message;
DELETE FROM series_context;
DELETE FROM compacted_contexts;
DELETE FROM fab;
DELETE FROM task_logs;
DELETE FROM task_event;
COMMIT;
-- The file gives up its free pages, and with them what was deleted before.
VACUUM;
