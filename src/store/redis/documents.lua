-- Lists documents of a tenant by when they were created.
-- KEYS documents of a collection, order of the tenant's; ARGV tenant; id after which to begin ('' for the first);
-- limit; asc or desc; bytes after which the reply ends
-- Returns ok, 1 if there are more, the last id that was looked at, then id and entry of each document
local newest_first = ARGV[4] == 'desc'
local all = redis.call('ZCARD', KEYS[2])
-- Servers that evict drop keys one by one. A list without documents that exist would say that they do not.
if all < tonumber(redis.call('HGET', KEYS[1], 'n:' .. ARGV[1]) or '0') then
  return {'incomplete'}
end
local from = 0
if ARGV[2] ~= '' then
  local rank = redis.call(newest_first and 'ZREVRANK' or 'ZRANK', KEYS[2], ARGV[2])
  if not rank then
    return {'unknown_after'}
  end
  from = rank + 1
end
local limit = tonumber(ARGV[3])
local to = from + limit - 1
local ids = limit == 0 and {} or redis.call(newest_first and 'ZREVRANGE' or 'ZRANGE', KEYS[2], from, to)
local found, bytes, count = {'ok', '0', ''}, 0, 0
for _, id in ipairs(ids) do
  if bytes >= tonumber(ARGV[5]) then
    break
  end
  local entry = redis.call('HGET', KEYS[1], ARGV[1] .. ':' .. id)
  if entry then
    found[#found + 1] = id
    found[#found + 1] = entry
    bytes = bytes + #entry
  end
  found[3] = id
  count = count + 1
end
if from + count < all then
  found[2] = '1'
end
return found
