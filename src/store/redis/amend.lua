-- Adds the partial output to a response that was cancelled while this owner ran it, once.
-- KEYS record; ARGV owner, fencing number, then fields and values
local v = load(KEYS[1], ARGV[1], ARGV[2])
local refused = refusal(v)
if not refused then
  return {'fenced'}
end
if refused[1] ~= 'terminal' or v.st ~= 'cancelled' or v.am then
  return refused
end
drop_pieces(KEYS[1], 're')
drop_pieces(KEYS[1], 'ou')
redis.call('HSET', KEYS[1], 'am', '1', unpack(ARGV, 3))
redis.call('HDEL', KEYS[1], 'po')
drop_request(KEYS[1])
return {'ok'}
