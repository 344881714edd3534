-- Takes no more events for an endpoint, and drops those that wait, unless another fingerprint is newer.
-- KEYS as in outbox_add.lua; ARGV fingerprint, TTL in ms
-- Returns how many were dropped
local dropped = 0
if (redis.call('ZREVRANGE', KEYS[5], 0, 0)[1] or ARGV[1]) == ARGV[1] then
  dropped = redis.call('ZCARD', KEYS[2])
  redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
end
redis.call('SET', KEYS[4], ARGV[1], 'PX', ARGV[2])
return {tostring(dropped)}
