-- Creates a response, unless its id exists; with the items that it leaves in its conversation, or not at all.
-- KEYS record; the records that it continues, or the mark of its root and the first and the last of them (if number of
-- items is `ends`), or those of its conversation; ARGV token, ttl in ms (0: none), ttl of its
-- chain, number of items ('' for no conversation; else followed by token of the lock, TTL and maximum bytes of a
-- conversation, how many tokens are remembered, and id, bytes and value of each item), then fields and values
-- Returns ok, or again if it was applied before; broken and the place of a record that it continues and that is missing,
-- whole if all records of its chain must be looked at; and then nothing is written
local v = redis.call('HMGET', KEYS[1], 'st', 'tk')
if v[1] then
  return {v[2] == ARGV[1] and 'again' or 'exists'}
end
local fields_at = 5
if ARGV[4] == 'ends' then
  -- Most chains are as they were when they were read.
  if redis.call('EXISTS', KEYS[2]) == 1 or is_outdated(KEYS[3], ARGV[3]) or not renew(KEYS[4], ARGV[3]) then
    return {'whole'}
  end
elseif ARGV[4] ~= '' then
  fields_at = 9 + 3 * tonumber(ARGV[4])
  local keys = {KEYS[2], KEYS[3], KEYS[4]}
  local put = put_items(keys, 'commit', ARGV[5], ARGV[6], ARGV[7], '', ARGV[8], 9, fields_at - 1)
  if put[1] ~= 'ok' and put[1] ~= 'again' then
    return put
  end
else
  local missing = keep_chain(KEYS, 2, ARGV[3])
  if missing then
    return {'broken', tostring(missing - 2)}
  end
end
redis.call('HSET', KEYS[1], 'v', VERSION, 'tk', ARGV[1], unpack(ARGV, fields_at))
expire(KEYS[1], ARGV[2])
return {'ok'}
