-- KEYS notes. ARGV fields. Crash notes of what is acknowledged.
return redis.call('HDEL', KEYS[1], unpack(ARGV))
