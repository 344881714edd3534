-- Takes over a running response whose owner's lease has expired (which the caller has checked), or that was
-- released; or a cancelled one whose output is still to be stored. An attempt counts when an engine has started it
-- (before that field existed, when the response is in progress); a release ends a run without counting it as lost.
-- KEYS record; ARGV expected owner, expected fencing number, new owner, new fencing number
local v = load(KEYS[1])
if not v.st then
  return {'gone'}
end
if is_newer(v.v) then
  return {'newer', v.v}
end
local w = redis.call('HMGET', KEYS[1], 'bn', 'po')
if v.bg ~= '1' or not (runs(v.st) or v.st == 'cancelled' and w[2]) then
  return {'terminal', v.st}
end
if v.own ~= ARGV[3] or v.ep ~= ARGV[4] then
  if v.own ~= ARGV[1] or v.ep ~= ARGV[2] then
    return {'raced'}
  end
  if runs(v.st) then
    if w[1] == v.ep or not w[1] and v.st == 'in_progress' then
      redis.call('HINCRBY', KEYS[1], 'at', 1)
    end
    if v.own ~= '' then
      redis.call('HINCRBY', KEYS[1], 'lo', 1)
    end
    -- Records of older releases expire while they run.
    redis.call('PERSIST', KEYS[1])
  end
  redis.call('HSET', KEYS[1], 'own', ARGV[3], 'ep', ARGV[4])
end
w = redis.call('HMGET', KEYS[1], 'at', 'lo', 'sm')
return {'ok', v.st, w[1], w[2] or '0', w[3], tostring(v.sq)}
