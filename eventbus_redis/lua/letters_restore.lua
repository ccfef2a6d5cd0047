-- KEYS dlq, ids. ARGV per letter: event id, number of fields, fields. Parks letters that come from a file.
local at = 1
while at <= #ARGV do
  local event_id, given = ARGV[at], tonumber(ARGV[at + 1])
  local letter = redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 2, at + 1 + given))
  local others = redis.call('HGET', KEYS[2], event_id)
  redis.call('HSET', KEYS[2], event_id, others and (others .. ' ' .. letter) or letter)
  at = at + 2 + given
end
return 0
