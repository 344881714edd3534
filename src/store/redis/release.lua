-- Releases a running response, or a cancelled one whose output is still to be stored, so that any owner can take it
-- over.
-- KEYS record; ARGV owner, fencing number
local v = load(KEYS[1], ARGV[1], ARGV[2])
local refused = refusal(v)
local is_pending = refused and refused[1] == 'terminal' and redis.call('HGET', KEYS[1], 'po')
if refused and not is_pending then
  return refused
end
redis.call('HSET', KEYS[1], 'own', '')
redis.call('HINCRBY', KEYS[1], 'ep', 1)
return {'ok'}
