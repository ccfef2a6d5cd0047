-- KEYS dlq, ids, waiting, owners, tallies. ARGV: ids. Answers the positions of those that no longer stood there.
local gone, taken, seen = {}, {}, {}
for at, id in ipairs(ARGV) do
  local entry = not seen[id] and redis.call('XRANGE', KEYS[1], id, id)[1]
  seen[id] = true
  if entry then taken[#taken + 1] = listed(entry)
  else gone[#gone + 1] = at end
end
if #taken > 0 then remove_letters(1, taken) end
return gone
