"""Lua scripts of the store of responses: each is one step for Redis, whoever else writes.

Keys of a wrong type are garbage: read as none, overwritten. Each step of a loop removes something,
so none runs for ever, whatever Redis has. How long one takes does not grow with the number of
holders, unless sums are lost or wrong.
"""

from __future__ import annotations

# Functions of both scripts that change the sums; that of all holders has the name "".
_SUMS = """
local function held(whose)
  local sum = redis.pcall('ZSCORE', sums, whose)
  return type(sum) == 'string' and tonumber(sum) or 0
end
local function change(whose, bytes)
  local sum = held(whose) + bytes
  if sum > 0 and sum < 2^53 then
    redis.call('ZADD', sums, string.format('%.0f', sum), whose)
  else
    redis.call('ZREM', sums, whose)
  end
end
"""

# Store a value. Where there is no room, the oldest values of whoever has most bytes with the new
# value are removed, or those of its holder where that one's bound is reached. Returns whether it is
# stored.
# KEYS: sorted sets of holders, by bytes and by when their last value ends. ARGV: prefix of values,
# of sets, id, value, TTL in ms, bound in bytes, holder, its bound.
PUT = (
    """
local sums, ends = KEYS[1], KEYS[2]
local prefix, sets, id, value, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local bound, holder, most = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local own = sets .. holder
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if #value > bound or #value > most then return 0 end
for _, key in ipairs({sums, ends, own}) do
  if redis.call('TYPE', key).ok ~= 'zset' then redis.call('DEL', key) end
end
"""
    + _SUMS
    + """
local function sum_all()
  local total, all = 0, redis.call('ZRANGE', sums, 0, -1, 'WITHSCORES')
  for n = 1, #all, 2 do
    local bytes = tonumber(all[n + 1])
    if bytes and bytes > 0 and bytes <= bound and all[n] ~= '' then
      total = total + bytes
    else
      redis.call('ZREM', sums, all[n])
    end
  end
  change('', total)
end
local function remove(whose, size)
  size = math.min(size, held(whose))
  change(whose, -size)
  change('', -size)
  if held('') == 0 then sum_all() end
end
local function forget(whose)
  redis.call('DEL', sets .. whose)
  redis.call('ZREM', ends, whose)
  remove(whose, held(whose))
end
local function drop(whose, before)
  local first = redis.pcall('ZRANGE', sets .. whose, 0, 0, 'WITHSCORES')
  if not first[1] then
    forget(whose)
    return false
  end
  if before and tonumber(first[2]) > before then return false end
  redis.call('ZREM', sets .. whose, first[1])
  local name, size = string.match(first[1], '^(%S+) (%d+)$')
  if name then
    redis.call('DEL', prefix .. name)
    remove(whose, tonumber(size))
  end
  return true
end
local function largest()
  local top = redis.call('ZREVRANGE', sums, 0, 1)
  local found = top[1] == '' and top[2] or top[1]
  local with_value = held(holder) > 0 and held(holder) + #value or 0
  return found and with_value > held(found) and holder or found
end
if not (held('') > 0 and held('') <= bound) then sum_all() end
if held(holder) <= 0 or held(holder) > bound then -- Redis may remove any key if its memory is full
  redis.call('ZREM', sums, holder)
  local members = redis.call('ZRANGE', own, 0, -1)
  for _, member in ipairs(members) do
    local name, size = string.match(member, '^(%S+) (%d+)$')
    if name and tonumber(size) <= bound then
      change(holder, tonumber(size))
    else
      redis.call('ZREM', own, member)
    end
  end
  if #members > 0 then sum_all() end
end
for _, whose in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now, 'LIMIT', 0, 100)) do
  forget(whose)
end
while drop(holder, now) do end
while held(holder) + #value > most and drop(holder) do end
while held('') + #value > bound do
  local whose = largest()
  if not whose then
    redis.call('DEL', sums)
    break
  end
  drop(whose)
end
redis.call('SET', prefix .. id, value, 'PX', ttl)
redis.call('ZADD', own, now + ttl, id .. ' ' .. #value)
redis.call('ZADD', ends, now + ttl, holder)
change(holder, #value)
change('', #value)
for _, key in ipairs({sums, ends, own}) do redis.call('PEXPIRE', key, ttl) end
return 1
"""
)

# Return a value up to a bound; for a value of a wrong type, a text without a seal.
# KEYS: the value. ARGV: place of the last byte.
GET = """
local value = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[1])
return type(value) == 'string' and value or 'of a wrong type'
"""

# Remove a value.
# KEYS: sorted set of holders, by bytes. ARGV: prefix of values, of sets, id, holder.
REMOVE = (
    """
local sums, key, whose = KEYS[1], ARGV[1] .. ARGV[3], ARGV[4]
"""
    + _SUMS
    + """
local size = redis.pcall('STRLEN', key)
if redis.call('DEL', key) == 1 and type(size) == 'number' and
   redis.pcall('ZREM', ARGV[2] .. whose, ARGV[3] .. ' ' .. size) == 1 and held(whose) >= size then
  change(whose, -size)
  change('', -size)
end
return 1
"""
)
