-- Writes one piece of a large value, before the value that refers to it.
-- KEYS record; ARGV field, bytes, token of a creation or '', owner ('' for a cancel), fencing number
local v = load(KEYS[1], ARGV[4], ARGV[5])
if ARGV[3] ~= '' then
  if v.st then
    return {'exists'}
  end
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  -- Expires if the value never follows.
  redis.call('PEXPIRE', KEYS[1], 3600000)
  return {'ok'}
end
if ARGV[4] == '' then
  -- Any replica may cancel. The cancel itself says why there is nothing to cancel.
  if v.bg == '1' and runs(v.st) and not is_newer(v.v) then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  end
  return {'ok'}
end
local refused = refusal(v)
if refused and not (refused[1] == 'terminal' and v.st == 'cancelled' and not v.am) then
  return refused
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return {'ok'}
