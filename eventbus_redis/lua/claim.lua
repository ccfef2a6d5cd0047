-- KEYS stream, notes. ARGV: service, consumer, lease ms, cursor, how many, m|q. Takes over what a vanished consumer
-- held. Answers the next cursor, the entries, the ids that somebody deleted from the stream, and the notes.
local found = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], 'COUNT', ARGV[5])
local notes = {}
for i, entry in ipairs(found[2]) do notes[i] = redis.call('HGET', KEYS[2], ARGV[6] .. entry[1]) end
return {found[1], found[2], found[3], notes}
