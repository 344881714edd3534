-- Extends the retention of responses that another one continues.
-- KEYS records; ARGV ttl in ms (0: none)
-- Returns ok; or broken and the place of the newest record that is missing
local missing = keep_chain(KEYS, 1, ARGV[1])
if missing then
  return {'broken', tostring(missing - 1)}
end
return {'ok'}
