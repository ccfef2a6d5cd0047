-- KEYS dlq, ids, waiting, owners, tallies. ARGV: consumer, then per letter: op, id, wait ms. op: a ack (remove), w wait,
-- n renew the lease, g let go. Answers the positions of those that are no longer ours.
local lost = {}
for at = 2, #ARGV, 3 do
  local op, id = ARGV[at], ARGV[at + 1]
  local entry = redis.call('HGET', KEYS[4], id) == ARGV[1] and redis.call('XRANGE', KEYS[1], id, id)[1]
  if not entry then
    lost[#lost + 1] = (at + 1) / 3
  elseif op == 'a' then
    remove_letters(1, {listed(entry)})
  else
    redis.call('ZADD', KEYS[3], due_ms(ARGV[at + 2]), id)
    if op ~= 'n' then redis.call('HDEL', KEYS[4], id) end
  end
end
return lost
