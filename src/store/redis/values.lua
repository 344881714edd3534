-- Reads fields of several responses, in order, until about the given number of bytes is reached.
-- KEYS records; ARGV bytes; TTL in ms to extend what is read to (0: no expiry, '' to leave it unchanged); then
-- names of fields
-- Returns for each key its fields, or false for a missing response.
local found, bytes = {}, 0
for place, key in ipairs(KEYS) do
  if bytes >= tonumber(ARGV[1]) then
    return found
  end
  local v = redis.call('HMGET', key, 'st', 'v', unpack(ARGV, 3))
  if not v[1] then
    found[place] = false
  elseif is_newer(v[2]) then
    return redis.error_reply('NEWER ' .. v[2])
  else
    local values = {}
    for number = 3, #ARGV do
      local field = v[number]
      values[number - 2] = field
      bytes = bytes + (field and #field or 0)
    end
    found[place] = values
    if ARGV[2] ~= '' then
      renew(key, ARGV[2])
    end
  end
end
return found
