-- Creates a response, unless its id exists.
-- KEYS record, and the record that it continues; ARGV token, ttl in ms (0: none), ttl of its chain, then fields
-- and values
local v = redis.call('HMGET', KEYS[1], 'st', 'tk')
if v[1] then
  return {v[2] == ARGV[1] and 'ok' or 'exists'}
end
redis.call('HSET', KEYS[1], 'v', VERSION, 'tk', ARGV[1], unpack(ARGV, 4))
expire(KEYS[1], ARGV[2])
if KEYS[2] then
  -- The rest of the chain was renewed when its history was read.
  renew(KEYS[2], ARGV[3])
end
return {'ok'}
