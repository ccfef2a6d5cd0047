-- KEYS stream, notes. ARGV: service, consumer, id, field, story. The story of an entry that is held.
if not is_mine(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
return 1
