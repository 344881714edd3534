-- Deletes a response and its log, and marks its root for a day: longer than any run may last that continues it.
-- KEYS record, log, mark of its root
local v = redis.call('HMGET', KEYS[1], 'st', 'own')
if not v[1] then
  return {'gone'}
end
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('SET', KEYS[3], '1', 'EX', 86400)
return {'ok', v[1], v[2] or ''}
