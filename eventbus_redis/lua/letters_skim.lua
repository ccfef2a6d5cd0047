-- KEYS dlq. ARGV: from where, how many. Of each letter its id, event id and story, without the body that others need.
-- Nothing at all if one stands there without an event id: somebody added it by hand, and it has to be read as a whole.
local found = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
  local event_id, story = nil, ''
  local fields = entry[2]
  for i = #fields - 1, 1, -2 do
    local name = fields[i]
    if name == EVENT_ID then event_id = fields[i + 1] elseif name == STORY then story = fields[i + 1] end
  end
  if not event_id then return nil end
  local at = #found
  found[at + 1], found[at + 2], found[at + 3] = entry[1], event_id, story
end
return found
