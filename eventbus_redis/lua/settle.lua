-- KEYS main, queue, retry, payload, notes, dlq, ids, tallies. ARGV: service, consumer; ids to acknowledge of main, with
-- blanks between them; the same of queue; then each copy: op, m|q, id, story, delay ms, event id, facets, number of
-- fields given, fields. op: r retry, p park, l release, k release in its place.
-- Answers two lists of positions: no longer ours; ours, but the entry is gone
-- from its stream (somebody trimmed it), so that the copy needs its fields from the caller.
local service, consumer = ARGV[1], ARGV[2]
local lost, bare = {}, {}
local at, position = 5, 0
local acks = {}
for source = 1, 2 do
  local mine, count = {}, 0
  local ids = words(ARGV[2 + source])
  local held = all_mine(KEYS[source], service, consumer, ids, 1, #ids)
  for _, id in ipairs(ids) do
    position = position + 1
    if held[id] then
      count = count + 1
      mine[count] = id
    else
      lost[#lost + 1] = position
    end
  end
  acks[source] = mine
end
-- Copies first: with a full memory the first of them fails, and nothing has been changed by then.
local last = #ARGV
while at <= last do
  position = position + 1
  local op, source, id, story, wait = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local event_id, facets, given = ARGV[at + 5], ARGV[at + 6], tonumber(ARGV[at + 7])
  local index = source == 'm' and 1 or 2
  local key = KEYS[index]
  if not is_mine(key, service, consumer, id) then
    lost[#lost + 1] = position
  else
    local fields
    if given > 0 then
      fields = {unpack(ARGV, at + 8, at + 7 + given)}
    else
      local entry = redis.call('XRANGE', key, id, id)[1]
      fields = entry and entry[2]
    end
    if op == 'k' then
      -- It stays pending, with its story beside it, for the next reader; owned by nobody, as after let_go.lua.
      if story ~= '' then redis.call('HSET', KEYS[5], source .. id, story) end
      redis.call('XCLAIM', key, service, '@released', 0, id, 'IDLE', '31536000000', 'JUSTID')
    elseif not fields then
      bare[#bare + 1] = position
    else
      if op == 'r' then
        delay(KEYS[3], KEYS[4], source .. id, wait, copy_of(fields, id, story))
      elseif op == 'p' then
        local letter = redis.call('XADD', KEYS[6], '*', unpack(copy_of(fields, id, story, event_id, facets)))
        local others = redis.call('HGET', KEYS[7], event_id)
        redis.call('HSET', KEYS[7], event_id, others and (others .. ' ' .. letter) or letter)
        count_facets(8, facets, 1)
      else
        redis.call('XADD', KEYS[2], '*', unpack(copy_of(fields, id, story)))
      end
      redis.call('HDEL', KEYS[5], source .. id)
      local mine = acks[index]
      mine[#mine + 1] = id
    end
  end
  at = at + 8 + given
end
for source = 1, 2 do
  local mine = acks[source]
  for from = 1, #mine, 2000 do
    local to = math.min(from + 1999, #mine)
    redis.call('XACK', KEYS[source], service, unpack(mine, from, to))
    -- The queue has one reader group: what it has finished is removed at once. The main stream is trimmed.
    if source == 2 then redis.call('XDEL', KEYS[2], unpack(mine, from, to)) end
  end
end
return {lost, bare}
