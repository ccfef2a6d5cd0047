#!lua flags=allow-oom
-- KEYS queue, retry, payload, dlq, ids, waiting, owners, tallies. ARGV: number of different changes, and they; length of the
-- letters' facets_of, and it, if the caller knows it (0 if not); then per letter: id, which changes of its story, delay ms,
-- 1 if a body is given, body. Back to the service's own stream, or to the retry road, and out of the dead letters in one
-- step. The changes travel beside the story, which is not read here. Answers the positions of those that no longer stood
-- there.
local BODIES = {'data', 'body', 'payload', 'message', '__data__'}

local function set_body(copy, body)
  for _, name in ipairs(BODIES) do
    for i = 1, #copy, 2 do
      if copy[i] == name then
        copy[i + 1] = body
        return
      end
    end
  end
  copy[#copy + 1] = 'data'
  copy[#copy + 1] = body
end

-- The fields of a letter for its way back. Where they end as we write them, what only a letter has makes room for the
-- changes; others are copied.
local function put_back(fields, id, changes)
  local last = #fields
  local ours = fields[last - 3] == EVENT_ID and fields[last - 1] == FACETS
  if ours and (fields[last - 5] == ORIGIN or fields[last - 7] == ORIGIN) then
    fields[last - 1], fields[last] = nil, nil
    fields[last - 3], fields[last - 2] = CHANGES, changes
    return fields
  end
  local copy = copy_of(fields, id)
  copy[#copy + 1] = CHANGES
  copy[#copy + 1] = changes
  return copy
end

-- Letters are mostly moved in a row: one call for all of them; those that are not are looked for one by one.
local counted = ARGV[1] + 2
local first = counted + ARGV[counted] + 1
local found = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[4], ARGV[first], ARGV[#ARGV - 4], 'COUNT', (#ARGV - first + 1) / 5)) do
  found[entry[1]] = entry
end
local gone, taken, seen = {}, {}, {}
for at = first, #ARGV, 5 do
  local id, wait = ARGV[at], tonumber(ARGV[at + 2])
  local entry = not seen[id] and (found[id] or redis.call('XRANGE', KEYS[4], id, id)[1])
  seen[id] = true
  if not entry then
    gone[#gone + 1] = (at - first + 5) / 5
  else
    taken[#taken + 1] = listed(entry)
    local copy = put_back(entry[2], id, ARGV[1 + ARGV[at + 1]])
    if ARGV[at + 3] == '1' then
      set_body(copy, ARGV[at + 4])
    end
    if wait > 0 then delay(KEYS[2], KEYS[3], 'd' .. id, wait, copy)
    else redis.call('XADD', KEYS[1], '*', unpack(copy)) end
  end
end
-- What the caller knows is of all of them.
local sums = #gone == 0 and first > counted + 1 and {unpack(ARGV, counted + 1, first - 1)} or nil
if #taken > 0 then remove_letters(4, taken, sums) end
return gone
