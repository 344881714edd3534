-- Deletes an item of a conversation and returns the conversation's object.
-- KEYS conversation, items, order; ARGV item
local v = redis.call('HMGET', KEYS[1], 'v', 'ob', 'by')
if not v[1] then
  return {'gone'}
end
if is_newer(v[1]) then
  return {'newer', v[1]}
end
if is_damaged(KEYS, v[3]) then
  return {'damaged'}
end
local found = redis.call('HGET', KEYS[2], 'i:' .. ARGV[1])
if not found then
  return {'no_item'}
end
local bytes, packed = string.match(found, '^(%d+):(.*)$')
local nonce, count = string.match(packed, '^c(%x+):(%d+)$')
if nonce then
  for piece = 0, tonumber(count) - 1 do
    redis.call('HDEL', KEYS[2], 'k:' .. nonce .. ':' .. piece)
  end
end
redis.call('HDEL', KEYS[2], 'i:' .. ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[1], 'by', string.format('%.0f', tonumber(v[3]) - tonumber(bytes)))
return {'ok', v[2]}
