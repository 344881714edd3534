-- Takes no more events for an endpoint, and drops those that wait. If another fingerprint is newer, only claims with
-- this one get none.
-- KEYS as in outbox_add.lua; ARGV fingerprint, TTL in ms
-- Returns how many were dropped
if (redis.call('ZREVRANGE', KEYS[5], 0, 0)[1] or ARGV[1]) ~= ARGV[1] then
  redis.call('ZADD', KEYS[5], 'XX', '-1', ARGV[1])
  return {'0'}
end
local dropped = redis.call('ZCARD', KEYS[2])
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
redis.call('SET', KEYS[4], ARGV[1], 'PX', ARGV[2])
return {tostring(dropped)}
