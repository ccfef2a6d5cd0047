#!lua flags=allow-oom
-- KEYS retry, payload, queue. ARGV: how many at most. What is due goes to the service's own stream.
-- Allowed with a full memory: it moves, and what cannot be moved could never be finished and freed.
-- Answers how many were moved, and in how many ms the next is due (-1: none is waiting).
local now = now_ms()
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'LIMIT', 0, ARGV[1])
for _, member in ipairs(due) do
  local packed = redis.call('HGET', KEYS[2], member)
  if packed then redis.call('XADD', KEYS[3], '*', unpack(cmsgpack.unpack(packed))) end
  redis.call('ZREM', KEYS[1], member)
  redis.call('HDEL', KEYS[2], member)
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return {#due, first[2] and math.max(0, first[2] - now) or -1}
