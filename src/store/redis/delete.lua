-- Deletes a response and its log.
-- KEYS record, log
local v = redis.call('HMGET', KEYS[1], 'st', 'own')
if not v[1] then
  return {'gone'}
end
redis.call('UNLINK', KEYS[1], KEYS[2])
return {'ok', v[1], v[2] or ''}
