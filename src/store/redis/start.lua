-- An engine has started: changes the status from queued to in progress, and notes whose run it is.
-- KEYS record; ARGV owner, fencing number
local v = load(KEYS[1], ARGV[1], ARGV[2])
local refused = refusal(v)
if refused then
  return refused
end
redis.call('HSET', KEYS[1], 'st', 'in_progress', 'bn', v.ep)
return {'ok'}
