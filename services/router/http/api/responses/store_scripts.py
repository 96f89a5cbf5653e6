"""Lua scripts of the store of responses: each is one step for Redis, whoever else writes.

Keys of a wrong type are garbage: read as none, overwritten.
"""

from __future__ import annotations

# Store a value. What has expired is removed; then, where there is no room, the oldest value of
# whoever has most bytes with the new value, or of its holder where that one's bound is reached.
# Returns whether it is stored.
# KEYS: sorted set, hash. ARGV: key prefix, id, value, TTL in ms, bound in bytes, holder, its bound.
PUT = """
local all, sums, prefix, id, value = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local ttl, bound, holder, most = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if #value > bound or #value > most then return 0 end
for key, kind in pairs({[all] = 'zset', [sums] = 'hash'}) do
  if redis.call('TYPE', key).ok ~= kind then redis.call('DEL', key) end
end
local function parts(member) return string.match(member, '^(%S+) (%d+) (%S+)$') end
local function add(whose, size)
  for _, field in ipairs({'', whose}) do
    local sum = redis.pcall('HINCRBY', sums, field, size)
    if type(sum) ~= 'number' or sum <= 0 then redis.call('HDEL', sums, field) end
  end
end
local function held(whose) return tonumber(redis.call('HGET', sums, whose) or '0') or 0 end
local function drop(member)
  local name, size, whose = parts(member)
  redis.call('ZREM', all, member)
  if name then
    redis.call('DEL', prefix .. name)
    add(whose, -size)
  end
end
local function oldest(whose)
  local from, some = 0, redis.call('ZRANGE', all, 0, 99)
  while #some > 0 do
    for _, member in ipairs(some) do
      if select(3, parts(member)) == whose then return member end
    end
    from = from + 100
    some = redis.call('ZRANGE', all, from, from + 99)
  end
end
local function largest()
  local found, size = nil, 0
  local fields = redis.call('HGETALL', sums)
  for n = 1, #fields, 2 do
    local bytes = tonumber(fields[n + 1]) or 0
    if fields[n] == holder then bytes = bytes + #value end
    if fields[n] ~= '' and bytes > size then found, size = fields[n], bytes end
  end
  return found
end
local function recount()
  redis.call('DEL', sums)
  for _, member in ipairs(redis.call('ZRANGE', all, 0, -1)) do
    local name, size, whose = parts(member)
    if name then add(whose, size) else drop(member) end
  end
end
-- Redis may remove any key where its memory is full: here the sums, below the sorted set.
if not (held('') > 0 and held('') <= bound) then recount() end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', all, '-inf', now)) do drop(member) end
while held('') + #value > bound or held(holder) + #value > most do
  local whose = held(holder) + #value > most and holder or largest()
  local member = oldest(whose)
  if member then drop(member) else recount() end
end
redis.call('SET', prefix .. id, value, 'PX', ttl)
redis.call('ZADD', all, now + ttl, id .. ' ' .. #value .. ' ' .. holder)
add(holder, #value)
redis.call('PEXPIRE', sums, ttl)
redis.call('PEXPIRE', all, ttl)
return 1
"""

# Return a value up to a bound; for a value of a wrong type, a text without a seal.
# KEYS: the value. ARGV: place of the last byte.
GET = """
local value = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[1])
return type(value) == 'string' and value or 'of a wrong type'
"""

# Remove a value. KEYS: sorted set, hash. ARGV: key prefix, id, holder.
REMOVE = """
local key, holder = ARGV[1] .. ARGV[2], ARGV[3]
local size = redis.pcall('STRLEN', key)
if redis.call('DEL', key) == 1 and type(size) == 'number' and
   redis.pcall('ZREM', KEYS[1], ARGV[2] .. ' ' .. size .. ' ' .. holder) == 1 and
   redis.pcall('HEXISTS', KEYS[2], holder) == 1 then
  redis.call('HINCRBY', KEYS[2], '', -size)
  if redis.call('HINCRBY', KEYS[2], holder, -size) <= 0 then
    redis.call('HDEL', KEYS[2], holder)
  end
end
return 1
"""
