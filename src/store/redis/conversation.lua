-- Updates the object of a conversation, or locks, unlocks or deletes the conversation.
-- KEYS conversation, items, order; ARGV update, lock, renew, unlock or delete; then
--   update: object, ttl in ms (0: none)   lock, renew: token, lease in ms   unlock: token
-- A lock is renewed for its holder alone: once another had it, what the former holder read is outdated.
local v = redis.call('HMGET', KEYS[1], 'v', 'lk', 'lu')
if not v[1] then
  return {'gone'}
end
if is_newer(v[1]) then
  return {'newer', v[1]}
end
if ARGV[1] == 'update' then
  redis.call('HSET', KEYS[1], 'ob', ARGV[2])
  for _, key in ipairs(KEYS) do
    expire(key, ARGV[3])
  end
elseif ARGV[1] == 'lock' or ARGV[1] == 'renew' then
  if ARGV[1] == 'renew' and v[2] ~= ARGV[2] then
    return {'lost'}
  end
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  if v[2] and v[2] ~= ARGV[2] and now < tonumber(v[3]) then
    return {'busy'}
  end
  redis.call('HSET', KEYS[1], 'lk', ARGV[2], 'lu', string.format('%.0f', now + tonumber(ARGV[3])))
elseif ARGV[1] == 'unlock' then
  if v[2] == ARGV[2] then
    redis.call('HDEL', KEYS[1], 'lk', 'lu')
  end
else
  redis.call('UNLINK', unpack(KEYS))
end
return {'ok'}
