-- Creates a response, unless its id exists; with the items that it leaves in its conversation, or not at all.
-- KEYS record; the record that it continues, or those of its conversation; ARGV token, ttl in ms (0: none), ttl of its
-- chain, number of items ('' for no conversation; else followed by token of the lock, TTL and maximum bytes of a
-- conversation, how many tokens are remembered, and id, bytes and value of each item), then fields and values
-- Returns ok, or again if it was applied before
local v = redis.call('HMGET', KEYS[1], 'st', 'tk')
if v[1] then
  return {v[2] == ARGV[1] and 'again' or 'exists'}
end
local fields_at = 5
if ARGV[4] ~= '' then
  fields_at = 9 + 3 * tonumber(ARGV[4])
  local keys = {KEYS[2], KEYS[3], KEYS[4]}
  local put = put_items(keys, 'commit', ARGV[5], ARGV[6], ARGV[7], '', ARGV[8], 9, fields_at - 1)
  if put[1] ~= 'ok' and put[1] ~= 'again' then
    return put
  end
elseif KEYS[2] then
  -- The rest of the chain was renewed when its history was read.
  renew(KEYS[2], ARGV[3])
end
redis.call('HSET', KEYS[1], 'v', VERSION, 'tk', ARGV[1], unpack(ARGV, fields_at))
expire(KEYS[1], ARGV[2])
return {'ok'}
