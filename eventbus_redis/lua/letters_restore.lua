-- KEYS dlq, ids, tallies. ARGV per letter: event id, facets, number of fields, fields. Parks letters that come from a file.
local at = 1
while at <= #ARGV do
  local event_id, facets, given = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local letter = redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 3, at + 2 + given))
  local others = redis.call('HGET', KEYS[2], event_id)
  redis.call('HSET', KEYS[2], event_id, others and (others .. ' ' .. letter) or letter)
  count_facets(3, facets, 1)
  at = at + 3 + given
end
return 0
