"""The Lua scripts of the prefix index. Each call is one round trip, whatever the prompt's length.

A block's entry is a hash: field worker id, value "<epoch>", or "<epoch>:<expires, ms>" for an
optimistic entry. Several 16-byte block hashes come as one string. Lua cannot hold numbers above
2^53, so epochs stay strings. Expiry is by Redis' clock: hosts' clocks differ. Entries of a wrong
type are garbage: read as none, overwritten.
"""

# Leading blocks after which each worker can go on, then the load that other routers have reserved
# on each: blocks, tokens, microseconds and rows, one text.
# ARGV: key prefix, hashes, load prefix, own router id, how many of a prefix's last blocks a worker
# needs (0: all), then id, epoch pairs.
LOOKUP = """
local prefix, hashes, load_prefix, own = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local needed = tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local counts, runs, ids, epochs, places, reserved = {}, {}, {}, {}, {}, {}
for i = 6, #ARGV, 2 do
  counts[#counts + 1], runs[#runs + 1] = 0, 0
  local loads, sums = redis.pcall('HGETALL', load_prefix .. ARGV[i]), {0, 0, 0, 0}
  for at = 1, #loads, 2 do
    local parts = {string.match(loads[at + 1], '^(%d+),(%d+),(%d+),(%d+):(%d+)$')}
    if loads[at] ~= own and #parts == 5 and tonumber(parts[5]) > now then
      for n = 1, 4 do sums[n] = math.min(sums[n] + tonumber(parts[n]), 2^53) end
    end
  end
  reserved[#reserved + 1] = string.format('%.0f,%.0f,%.0f,%.0f', unpack(sums))
  ids[#ids + 1], epochs[#epochs + 1], places[#places + 1] = ARGV[i], ARGV[i + 1], #counts
end
for block = 0, #hashes / 16 - 1 do
  local key = prefix .. string.sub(hashes, block * 16 + 1, block * 16 + 16)
  local values = redis.pcall('HMGET', key, unpack(ids))
  if values.err then break end
  local next_ids, next_epochs, next_places = {}, {}, {}
  for i = 1, #ids do
    local value, has = values[i], false
    if value then
      if value == epochs[i] then
        has = true
      else
        local epoch, expires = string.match(value, '^(%d+):(%d+)$')
        has = epoch == epochs[i] and tonumber(expires) > now
      end
    end
    local place = places[i]
    runs[place] = has and runs[place] + 1 or 0
    if has and (runs[place] > block or runs[place] >= needed and needed > 0) then
      counts[place] = block + 1
    end
    if has or needed > 0 then
      local n = #next_ids + 1
      next_ids[n], next_epochs[n], next_places[n] = ids[i], epochs[i], places[i]
    end
  end
  if #next_ids == 0 then break end
  ids, epochs, places = next_ids, next_epochs, next_places
end
for _, sums in ipairs(reserved) do counts[#counts + 1] = sums end
return counts
"""

# Add and remove a worker's entries. In the added hashes, delete entries of workers without a sign
# of life. Returns 1 if the worker's own sign of life was there: then Redis has lost nothing since.
# ARGV: key prefix, sign prefix, worker id, epoch, entry TTL in s, sign TTL in s, added, removed.
PUBLISH = """
local prefix, sign_prefix, id, epoch = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local added, removed = ARGV[7], ARGV[8]
local known = redis.pcall('GET', sign_prefix .. id) == epoch
redis.call('SET', sign_prefix .. id, epoch, 'EX', ARGV[6])
local alive = {[id] = true}
local function is_alive(other)
  if alive[other] == nil then
    alive[other] = redis.call('EXISTS', sign_prefix .. other) == 1
  end
  return alive[other]
end
for at = 1, #added, 16 do
  local key = prefix .. string.sub(added, at, at + 15)
  local done = redis.pcall('HSET', key, id, epoch)
  if type(done) == 'table' then
    redis.call('DEL', key)
    redis.call('HSET', key, id, epoch)
  end
  redis.call('EXPIRE', key, ARGV[5])
  if redis.call('HLEN', key) > 1 then
    for _, other in ipairs(redis.call('HKEYS', key)) do
      if not is_alive(other) then redis.call('HDEL', key, other) end
    end
  end
end
for at = 1, #removed, 16 do
  redis.pcall('HDEL', prefix .. string.sub(removed, at, at + 15), id)
end
return known and 1 or 0
"""

# Add optimistic entries of workers that do not have the blocks yet, and a router's reserved load.
# ARGV: key prefix, hashes, TTL in ms, load prefix, router id, number of workers, then id, epoch of
# each, then worker id, load, TTL in ms of each reservation; a load of none is empty.
ASSUME = """
local prefix, hashes, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])
local load_prefix, own, first_load = ARGV[4], ARGV[5], 7 + 2 * tonumber(ARGV[6])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expires = string.format(':%.0f', now + ttl)
for i = 7, first_load - 1, 2 do
  local id, epoch = ARGV[i], ARGV[i + 1]
  for at = 1, #hashes, 16 do
    local key = prefix .. string.sub(hashes, at, at + 15)
    local value = redis.pcall('HGET', key, id)
    if type(value) ~= 'table' and value ~= epoch then
      redis.call('HSET', key, id, epoch .. expires)
      if redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
    end
  end
end
for i = first_load, #ARGV, 3 do
  local key, amount, load_ttl = load_prefix .. ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  if amount == '' then
    redis.pcall('HDEL', key, own)
  elseif type(redis.pcall('HSET', key, own, amount .. string.format(':%.0f', now + load_ttl)))
      ~= 'table' and redis.call('PTTL', key) < load_ttl then
    redis.call('PEXPIRE', key, load_ttl)
  end
end
return 1
"""
