-- Releases a running response, so that any owner can take it over.
-- KEYS record; ARGV owner, fencing number
local v = load(KEYS[1], ARGV[1], ARGV[2])
local refused = refusal(v)
if refused then
  return refused
end
redis.call('HSET', KEYS[1], 'own', '')
redis.call('HINCRBY', KEYS[1], 'ep', 1)
return {'ok'}
