-- Reads items of a conversation: a page, all, or one.
-- KEYS conversation, items, order; ARGV page, all or one; item ('' for none); limit; asc or desc; maximum
-- bytes of all; bytes after which the reply ends
-- Returns ok, 1 if there are more, then id and packed value of each
local v = redis.call('HMGET', KEYS[1], 'v', 'by')
if not v[1] then
  return {'gone'}
end
if is_newer(v[1]) then
  return {'newer', v[1]}
end
if is_damaged(KEYS, v[2]) then
  return {'damaged'}
end
local function item(id)
  local found = redis.call('HGET', KEYS[2], 'i:' .. id)
  local packed = found and string.match(found, '^%d+:(.*)$')
  return packed
end
if ARGV[1] == 'one' then
  local found = item(ARGV[2])
  return found and {'ok', '0', ARGV[2], found} or {'no_item'}
end
if ARGV[1] == 'all' and tonumber(v[2]) > tonumber(ARGV[5]) then
  return {'too_large', v[2]}
end
local newest_first = ARGV[4] == 'desc'
local from = 0
if ARGV[2] ~= '' then
  local rank = redis.call(newest_first and 'ZREVRANK' or 'ZRANK', KEYS[3], ARGV[2])
  if not rank then
    return {'unknown_after'}
  end
  from = rank + 1
end
local limit = tonumber(ARGV[3])
local to = from + limit - 1
local ids = limit == 0 and {} or redis.call(newest_first and 'ZREVRANGE' or 'ZRANGE', KEYS[3], from, to)
local found, bytes, count = {'ok', '0'}, 0, 0
for _, id in ipairs(ids) do
  if bytes >= tonumber(ARGV[6]) then
    break
  end
  local packed = item(id) or ''
  found[#found + 1] = id
  found[#found + 1] = packed
  bytes = bytes + #packed
  count = count + 1
end
if from + count < redis.call('ZCARD', KEYS[3]) then
  found[2] = '1'
end
return found
