-- Reads this server's clock. A script, so that its reply says which call it belongs to.
-- KEYS a key that lies on the server; ARGV none
-- Returns the time in ms
local time = redis.call('TIME')
return {string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))}
