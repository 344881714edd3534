-- Reads the documents of all tenants that are due, earliest first.
-- KEYS documents of a collection, due ones of the collection; ARGV now in ms; maximum; bytes after which the reply ends;
-- how many come before the first that is read
-- Returns `tenant:id` and entry of each
local found, bytes = {}, 0
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[1], 'LIMIT', ARGV[4], ARGV[2])) do
  if bytes >= tonumber(ARGV[3]) then
    break
  end
  local entry = redis.call('HGET', KEYS[1], member)
  if entry then
    found[#found + 1] = member
    found[#found + 1] = entry
    bytes = bytes + #entry
  else
    -- It was evicted, and is not to stand before the others for ever. A server that refuses writes serves the read.
    redis.pcall('ZREM', KEYS[2], member)
  end
end
return found
