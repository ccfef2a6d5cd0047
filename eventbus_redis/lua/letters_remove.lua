-- KEYS dlq, ids, waiting, owners, tallies. ARGV: ids. Answers the positions of those that no longer stood there.
local gone = {}
for at, id in ipairs(ARGV) do
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  if entry then remove_letter(1, entry)
  else gone[#gone + 1] = at end
end
return gone
