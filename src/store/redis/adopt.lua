-- Takes over a running response whose owner's lease has expired (which the caller has checked), or that was
-- released.
-- KEYS record; ARGV expected owner, expected fencing number, new owner, new fencing number
local v = load(KEYS[1])
if not v.st then
  return {'gone'}
end
if is_newer(v.v) then
  return {'newer', v.v}
end
if v.bg ~= '1' or not runs(v.st) then
  return {'terminal', v.st}
end
if v.own ~= ARGV[3] or v.ep ~= ARGV[4] then
  if v.own ~= ARGV[1] or v.ep ~= ARGV[2] then
    return {'raced'}
  end
  redis.call('HSET', KEYS[1], 'own', ARGV[3], 'ep', ARGV[4])
  redis.call('HINCRBY', KEYS[1], 'at', 1)
end
local w = redis.call('HMGET', KEYS[1], 'at', 'sm', 'rq')
return {'ok', v.st, w[1], w[2], tostring(v.sq), value(KEYS[1], 'rq', w[3]) or ''}
