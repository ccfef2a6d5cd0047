-- KEYS dlq, ids, waiting, owners. ARGV: ids. Answers the positions of those that no longer stood there.
local gone = {}
for at, id in ipairs(ARGV) do
  local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
  if entry then remove_letter(KEYS[1], KEYS[2], KEYS[3], KEYS[4], entry)
  else gone[#gone + 1] = at end
end
return gone
