-- Reads values of some responses, from the first on, as many as come to about so many bytes.
-- KEYS records; ARGV bytes; ttl in ms that what is read is to have left at least (0: any, '' to leave it);
-- then names of fields
-- Answers with the fields as they lie there for each key, or false where there is no such response.
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
