-- Tries the commands of the store on a key that does not exist, without an effect that lasts.
-- KEYS a key that does not exist
-- Returns the commands that Redis refuses to this user or does not know, each with the reason
local key = KEYS[1]
local tried = {
  {'DEL', key}, {'EXISTS', key}, {'EXPIRE', key, '1'}, {'GET', key}, {'HDEL', key, 'f'}, {'HEXISTS', key, 'f'},
  {'HGET', key, 'f'}, {'HINCRBY', key, 'f', 'x'}, {'HMGET', key, 'f'}, {'HSET', key, 'f', 'v', 'f'},
  {'PERSIST', key}, {'PEXPIRE', key, '1'}, {'PTTL', key}, {'SADD', key, 'm'}, {'SCARD', key}, {'SMEMBERS', key},
  {'SRANDMEMBER', key}, {'SREM', key, 'm'}, {'SET', key, 'v', 'XX'}, {'TIME'}, {'UNLINK', key},
  {'XADD', key, 'NOMKSTREAM', '*', 'f', 'v'}, {'XDEL', key, '1'}, {'XRANGE', key, '-', '+'},
  {'ZADD', key, 'XX', '0', 'm'}, {'ZCARD', key}, {'ZRANGE', key, '0', '0'}, {'ZRANGEBYSCORE', key, '0', '0'},
  {'ZRANK', key, 'm'}, {'ZREM', key, 'm'}, {'ZREMRANGEBYSCORE', key, '0', '0'}, {'ZREVRANGE', key, '0', '0'},
  {'ZREVRANK', key, 'm'}, {'ZSCORE', key, 'm'},
}
-- As releases of Redis say it.
local reasons = {'NOPERM', 'user executing the script', 'nknown Redis command', 'nknown command'}
local lacking = {}
for _, command in ipairs(tried) do
  local reply = redis.pcall(unpack(command))
  local failed = type(reply) == 'table' and reply.err
  for _, reason in ipairs(reasons) do
    if failed and string.find(failed, reason, 1, true) then
      lacking[#lacking + 1] = command[1]
      lacking[#lacking + 1] = failed
      break
    end
  end
end
return lacking
