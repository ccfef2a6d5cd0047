-- Put before every other script: time, ids, copies, letters.
local STORY, CHANGES, ORIGIN = 'x-eventbus', 'x-redrive', 'x-stream-id'
local EVENT_ID, FACETS = 'x-event-id', 'x-facets'

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Upwards and one more: what is computed from it is never early.
local function due_ms(delay)
  return string.format('%.0f', now_ms() + 1 + tonumber(delay))
end

local function map(flat)
  local result = {}
  for i = 1, #flat, 2 do result[flat[i]] = flat[i + 1] end
  return result
end

local function exists(key)
  return redis.call('EXISTS', key) == 1
end

local function groups(key)
  local found = {}
  if exists(key) then
    for _, flat in ipairs(redis.call('XINFO', 'GROUPS', key)) do
      local group = map(flat)
      found[group['name']] = group
    end
  end
  return found
end

local function is_mine(key, group, consumer, id)
  local found = redis.call('XPENDING', key, group, id, id, 1)
  return found[1] ~= nil and found[1][2] == consumer
end

local function words(text)
  local found, count = {}, 0
  for word in string.gmatch(text, '%S+') do
    count = count + 1
    found[count] = word
  end
  return found
end

-- Which of these ids we hold. One by one each costs a call; from some number on, one call tells all that we hold between
-- the lowest and the highest of them. No COUNT that could cut it short: that would miss some.
local function all_mine(key, group, consumer, ids, first, last)
  local mine = {}
  if last - first < 16 then
    for i = first, last do mine[ids[i]] = is_mine(key, group, consumer, ids[i]) end
    return mine
  end
  local low, high, low_ms, high_ms = nil, nil, math.huge, -1
  for i = first, last do
    local text = string.match(ids[i], '^%d+')
    local ms = tonumber(text)
    if ms < low_ms then low, low_ms = text, ms end
    if ms > high_ms then high, high_ms = text, ms end
  end
  if high_ms > 2 ^ 53 then low, high = '-', '+' end  -- ids made by hand: numbers of Lua do not tell them apart
  for _, row in ipairs(redis.call('XPENDING', key, group, low, high, 10000000, consumer)) do mine[row[1]] = true end
  return mine
end

-- A copy of an entry's fields with another story, or with its own (nil). The id it came in by is kept: it is the id of
-- a foreign message, and when the broker took it.
local function copy_of(fields, id, story, event_id, facets)
  local copy, origin = {}, id
  for i = 1, #fields, 2 do
    local name = fields[i]
    if name == ORIGIN then
      origin = fields[i + 1]
    elseif name ~= EVENT_ID and name ~= FACETS and (story == nil or (name ~= STORY and name ~= CHANGES)) then
      copy[#copy + 1] = name
      copy[#copy + 1] = fields[i + 1]
    end
  end
  copy[#copy + 1] = ORIGIN
  copy[#copy + 1] = origin
  if story and story ~= '' then
    copy[#copy + 1] = STORY
    copy[#copy + 1] = story
  end
  if event_id then
    copy[#copy + 1] = EVENT_ID
    copy[#copy + 1] = event_id
    copy[#copy + 1] = FACETS
    copy[#copy + 1] = facets
  end
  return copy
end

local function delay(retry, payload, member, delay, copy)
  redis.call('HSET', payload, member, cmsgpack.pack(copy))
  redis.call('ZADD', retry, due_ms(delay), member)
end

-- From the end: what is asked for was added last.
local function field_of(fields, name)
  for i = #fields - 1, 1, -2 do
    if fields[i] == name then return fields[i + 1] end
  end
  return nil
end

-- Count a letter's facets in or out: KEYS[tally] and the following are a hash per facet, of values and their numbers.
local function count_facets(tally, facets, by)
  for i, value in ipairs(cjson.decode(facets)) do
    local key = KEYS[tally + i - 1]
    if redis.call('HINCRBY', key, value, by) <= 0 then redis.call('HDEL', key, value) end
  end
end

-- What the indexes know of a letter: its id, its event's id, its facets. One that was added by hand may lack the others.
local function listed(entry)
  return {entry[1], field_of(entry[2], EVENT_ID) or '', field_of(entry[2], FACETS)}
end

-- What many letters are counted by, together, as most of them share their values: facet, value, number, and so on.
local function facets_of(letters)
  local counts, sums = {}, {}
  for _, letter in ipairs(letters) do
    for i, value in ipairs(letter[3] and cjson.decode(letter[3]) or {}) do
      local of = counts[i] or {}
      counts[i] = of
      of[value] = (of[value] or 0) + 1
    end
  end
  for i, of in pairs(counts) do
    for value, count in pairs(of) do
      sums[#sums + 1] = i
      sums[#sums + 1] = value
      sums[#sums + 1] = count
    end
  end
  return sums
end

-- Take letters, which stand in a row from `from` on and have these ids, out of the index of event ids.
local function unlist(ids, letters, from, gone)
  local names = {}
  for i = 1, #gone do names[i] = letters[from + i - 1][2] end
  local alone = {}
  for i, standing in ipairs(redis.call('HMGET', ids, unpack(names))) do
    if standing == gone[i] then alone[#alone + 1] = names[i]
    elseif standing then
      local left = {}
      for other in string.gmatch(redis.call('HGET', ids, names[i]) or '', '%S+') do
        if other ~= gone[i] then left[#left + 1] = other end
      end
      if #left == 0 then redis.call('HDEL', ids, names[i])
      else redis.call('HSET', ids, names[i], table.concat(left, ' ')) end
    end
  end
  if #alone > 0 then redis.call('HDEL', ids, unpack(alone)) end
end

-- Take letters, as listed, out of the dead letters and out of their indexes. XDEL comes first: with a full memory it is
-- allowed, and after it so is the rest. KEYS[first]: dlq, ids, waiting, owners, the tallies. `sums`: their facets_of, from
-- who knows it.
local function remove_letters(first, letters, sums)
  local dlq, ids, waiting, owners = unpack(KEYS, first, first + 3)
  for from = 1, #letters, 1000 do
    local gone = {}
    for at = from, math.min(from + 999, #letters) do gone[#gone + 1] = letters[at][1] end
    redis.call('XDEL', dlq, unpack(gone))
    redis.call('ZREM', waiting, unpack(gone))
    redis.call('HDEL', owners, unpack(gone))
    unlist(ids, letters, from, gone)
  end
  sums = sums or facets_of(letters)
  for i = 1, #sums, 3 do
    local key, value = KEYS[first + 3 + sums[i]], sums[i + 1]
    if redis.call('HINCRBY', key, value, -sums[i + 2]) <= 0 then redis.call('HDEL', key, value) end
  end
end
