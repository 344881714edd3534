-- Creates a conversation, adds items to it, or commits the items of the response that locked it.
-- A conversation is a hash (v, tk token of its creation, ob object, nx next position, by bytes of items,
-- la and lc tokens of the last additions and commits, newest first, lk and lu holder and end of its lock), a hash of items
-- (`i:<id>` -> `<bytes>:<packed value>`, pieces of large ones beside them) and a sorted set of their ids.
-- KEYS conversation, items, order; ARGV create, add or commit; token; ttl in ms (0: none); maximum
-- bytes of items; the object ('' but for create); how many tokens are remembered; then id, bytes and value of
-- each item
-- Returns ok, or again if it was applied before
local how, token = ARGV[1], ARGV[2]
-- A token has a fixed length, and there is one space between two.
local function remembered(tokens)
  local all = token .. (tokens and ' ' .. tokens or '')
  return string.sub(all, 1, tonumber(ARGV[6]) * (#token + 1) - 1)
end
local v = redis.call('HMGET', KEYS[1], 'v', 'tk', 'la', 'lc', 'lk', 'by', 'nx')
if is_newer(v[1]) then
  return {'newer', v[1]}
end
if how == 'create' then
  if v[1] then
    return {v[2] == token and 'again' or 'exists'}
  end
elseif not v[1] then
  return {'gone'}
elseif string.find(how == 'add' and v[3] or how == 'commit' and v[4] or '', token, 1, true) then
  return {'again'}
elseif how == 'commit' and v[5] ~= token then
  return {'unlocked'}
end
local bytes = tonumber(v[6] or '0')
local seen = {}
for at = 7, #ARGV, 3 do
  if seen[ARGV[at]] or redis.call('HEXISTS', KEYS[2], 'i:' .. ARGV[at]) == 1 then
    return {'taken', ARGV[at]}
  end
  seen[ARGV[at]] = true
  bytes = bytes + tonumber(ARGV[at + 1])
end
if bytes > tonumber(ARGV[4]) then
  return {'too_large', tostring(bytes)}
end
local position = tonumber(v[7] or '0')
for at = 7, #ARGV, 3 do
  redis.call('HSET', KEYS[2], 'i:' .. ARGV[at], ARGV[at + 1] .. ':' .. ARGV[at + 2])
  redis.call('ZADD', KEYS[3], position, ARGV[at])
  position = position + 1
end
redis.call('HSET', KEYS[1], 'by', string.format('%.0f', bytes), 'nx', position)
if how == 'create' then
  redis.call('HSET', KEYS[1], 'v', VERSION, 'tk', token, 'ob', ARGV[5])
elseif how == 'add' then
  redis.call('HSET', KEYS[1], 'la', remembered(v[3]))
else
  redis.call('HSET', KEYS[1], 'lc', remembered(v[4]))
  redis.call('HDEL', KEYS[1], 'lk', 'lu')
end
for _, key in ipairs(KEYS) do
  expire(key, ARGV[3])
end
return {'ok'}
