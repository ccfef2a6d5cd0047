-- KEYS main, queue, reader. ARGV: service, consumer, how many. New entries of both streams, for the elected reader only:
-- checked here and now, because a call that waited on its way could come after somebody else's election.
-- Answers whether we are the reader, the entries of the queue and of main, and the last id read of main.
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return {0, {}, {}, '0-0'} end
local found = {}
for i = 1, 2 do
  local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[i], '>')
  found[i] = reply and reply[1] and reply[1][2] or {}
end
local main = groups(KEYS[1])[ARGV[1]]
return {1, found[2], found[1], main and main['last-delivered-id'] or '0-0'}
