-- Writes one piece of a large item, before the item that refers to it.
-- KEYS conversation, items; ARGV field, bytes, create or ''
if redis.call('EXISTS', KEYS[1]) == 0 then
  if ARGV[3] ~= 'create' then
    return {'gone'}
  end
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], 3600000)
  return {'ok'}
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return {'ok'}
