-- KEYS main, services, queue, retry, dlq, number of events that wait for their turn. ARGV: service, how many to count at most.
-- Answers unread in main; whether that was counted (1) or is the server's own figure (0; -1: it has none); last
-- delivered id, pending, length of queue, pending there, delayed, of those due, parked, age of the oldest letter in ms (-1: none). Or -1: not subscribed.
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then return -1 end
local unread, counted, last, pending, waiting = 0, 1, '0-0', 0, 0
local main, queue = groups(KEYS[1])[ARGV[1]], groups(KEYS[3])[ARGV[1]]
if main then last, pending = main['last-delivered-id'], main['pending']
else last = redis.call('HGET', KEYS[2], ARGV[1]) end
if exists(KEYS[1]) then
  local stream = map(redis.call('XINFO', 'STREAM', KEYS[1]))
  if stream['last-generated-id'] ~= last then
    -- The server's own arithmetic (entries-added less entries-read) is wrong after a restart from its AOF: Redis 7.0
    -- told 900 unread where there were none. So: count, as far as that is cheap.
    unread = #redis.call('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', ARGV[2])
    if unread >= tonumber(ARGV[2]) then
      local read = main and main['entries-read']
      counted = read and 0 or -1
      if read then unread = math.max(unread, stream['entries-added'] - read) end
    end
  end
end
if queue then waiting = queue['pending'] end
local now, age = now_ms(), -1
local oldest = redis.call('XRANGE', KEYS[5], '-', '+', 'COUNT', 1)[1]
if oldest then age = math.max(0, now - string.match(oldest[1], '%d+')) end
return {
  unread, counted, last, pending, redis.call('XLEN', KEYS[3]) + (redis.call('GET', KEYS[6]) or 0), waiting, redis.call('ZCARD', KEYS[4]),
  redis.call('ZCOUNT', KEYS[4], '-inf', string.format('%.0f', now)), redis.call('XLEN', KEYS[5]), age,
}
