"""A small strict PTX interpreter (numpy, SIMT): runs the code that Triton and nvcc compile, without a GPU.

Lanes of many blocks execute vectorised, reconverging at the smallest program counter. Checked on the way: global accesses out
of bounds, misaligned, or meeting another block's writes; shared memory out of bounds, read before written, or raced over by two
warps without a barrier; warp collectives with missing lanes; barriers that not all threads reach. An unknown instruction or
modifier raises. Not modelled: the error of approximate instructions, the memory model, tensor cores but mma.sync (tensor.py).
"""

import ctypes
import re
import struct

import numpy as np

np.seterr(all="ignore")
BITS = {
    "pred": 1,
    "b8": 8,
    "u8": 8,
    "s8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "bf16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "f16x2": 32,
    "bf16x2": 32,
    "b64": 64,
    "u64": 64,
    "s64": 64,
    "f64": 64,
    "f32x2": 64,
}
RAW = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
NP = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    **{f"{k}{b}": np.dtype(f"{n}{b // 8}").type for k, n in (("b", "u"), ("u", "u"), ("s", "i")) for b in (8, 16, 32, 64)},
}
#: Modifiers of instructions; any other raises, never a silent guess.
KNOWN = set(
    """global shared local param nc v2 v4 v8 cta gpu sys relaxed acquire release acq_rel volatile weak L1 L2 to sync aligned
    bfly down up idx add max min and or xor exch ballot any all eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan
    wide rn rz rm rp rni rzi rmi rpi approx full ftz sat NaN clamp wrap warp uni l r proxy async m8n8 x1 x2 x4 trans""".split()
)


class PtxError(RuntimeError):
    pass


def bf_up(u):
    return (u.astype(np.uint32) << 16).view(np.float32)


def bf_dn(f):
    b = np.ascontiguousarray(f, np.float32).view(np.uint32)
    return np.where(np.isnan(f), np.uint16(0x7FFF), ((b + 0x7FFF + ((b >> 16) & 1)) >> 16).astype(np.uint16)).astype(np.uint16)


def view(raw, ty):
    return bf_up(raw) if ty == "bf16" else raw.view(NP[ty]) if BITS[ty] > 1 else raw


def directed(exact, op):
    """float64 to float32 with the rounding that the instruction names: rz, rm or rp."""
    near = exact.astype(np.float32)
    down, up = near > exact, near < exact
    below, above = np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))
    if "rm" in op:
        return np.where(down, below, near)
    if "rp" in op:
        return np.where(up, above, near)
    return np.where(down & (exact > 0), below, np.where(up & (exact < 0), above, near))


def high(x, y):
    """The upper half of a product of integers."""
    bits = 8 * x.dtype.itemsize
    if bits < 64:
        wide = np.int64 if x.dtype.kind == "i" else np.uint64
        return ((x.astype(wide) * y.astype(wide)) >> wide(bits)).astype(x.dtype)
    return ((x.astype(object) * y.astype(object)) >> bits).astype(x.dtype)


def fused(x, y, z):
    """x y + z, rounded once: nearly, for float64."""
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    return x.astype(wide) * y.astype(wide) + z.astype(wide)


def compared(how, x, y):
    """A comparison of PTX; one with a `u` also holds for NaN."""
    nan = np.isnan(x) | np.isnan(y) if x.dtype.kind == "f" else np.zeros_like(x, bool) | np.zeros_like(y, bool)
    base = how[:-1] if how in ("equ", "neu", "ltu", "leu", "gtu", "geu") else how
    holds = {
        "eq": x == y,
        "ne": (x != y) & ~nan,
        "lt": x < y,
        "le": x <= y,
        "gt": x > y,
        "ge": x >= y,
        "lo": x < y,
        "ls": x <= y,
        "hi": x > y,
        "hs": x >= y,
        "num": ~nan,
        "nan": nan,
    }[base]
    return holds if base == how else holds | nan


def entries(text):
    """Name -> its PTX alone, of a module with many kernels."""
    starts = [m.start() for m in re.finditer(r"^(?:\.(?:visible|weak)\s+)?\.entry", text, re.M)]
    parts = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    head = "" if not starts else text[: starts[0]]
    return {re.search(r"\.entry\s+([\w$]+)", part)[1]: head + part for part in parts}


class Kernel:
    def __init__(self, text, name=None):
        text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text), flags=re.S)
        text = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*$", "", text, flags=re.M)
        ents = list(re.finditer(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, re.S))
        m = next(e for e in ents if name is None or name == e.group(1))
        self.name, self.params, self.shsyms, self.shsize, self.dyn = m.group(1), [], {}, 0, None
        self.local, self.local_size = {}, 0
        off = 0
        for p in filter(None, (q.strip() for q in m.group(2).split(","))):
            d = re.match(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\b.*?([\w$]+)(?:\[(\d+)\])?$", p, re.S)
            n = BITS[d.group(2)] // 8 * int(d.group(4) or 1)
            align = n if not d.group(4) else int(d.group(1) or 8)
            off = -(-off // align) * align
            self.params.append((d.group(3), d.group(2), off, n))
            off += n
        self.pbytes = off
        depth, i = 1, m.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            i += 1
        for s in re.finditer(
            r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(\[(\d*)\])?\s*;", text[: m.start()] + text[m.end() : i]
        ):
            al = int(s.group(1) or 16)
            if not re.search(re.escape(s.group(3)) + r"(?![\w$])", text[m.end() : i]):
                continue  # of another kernel of the module
            if s.group(4) and not s.group(5):
                self.dyn = s.group(3)
                continue
            self.shsize = -(-self.shsize // al) * al
            self.shsyms[s.group(3)] = self.shsize
            self.shsize += BITS[s.group(2)] // 8 * int(s.group(5) or 1)
        for s in re.finditer(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]\s*;", text[m.end() : i]):
            self.local_size = -(-self.local_size // int(s.group(1))) * int(s.group(1))
            self.local[s.group(2)] = self.local_size
            self.local_size += int(s.group(3))
        self.labels, self.code, self.regw = {}, [], {}
        for st in text[m.end() : i - 1].split(";"):
            st = st.strip()
            while True:
                st = st.lstrip("{} \t\n")
                label = re.match(r"([\w$]+)\s*:(?!:)", st)
                if not label:
                    break
                self.labels[label.group(1)] = len(self.code)
                st = st[label.end() :].strip()
            r = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", st, re.S)
            if r:
                for v in r.group(2).split(","):
                    v = v.strip()
                    g = re.match(r"(.*)<(\d+)>", v)
                    self.regw[g.group(1) if g else v] = (BITS[r.group(1)], bool(g))
                continue
            if not st or st.startswith("."):
                continue
            g = re.match(r"(?:@(!?)([%\w]+)\s+)?([\w\.:]+)\s*(.*)$", st, re.S)
            self.code.append(
                (g.group(2), g.group(1) == "!", g.group(3).split("."), self._ops(g.group(4)), " ".join(st.split()))
            )

    def _ops(self, s):
        out, cur, d = [], "", 0
        for ch in s:
            d += ch in "{[("
            d -= ch in "}])"
            if ch == "," and d == 0:
                out.append(cur.strip())
                cur = ""
            else:
                cur += ch
        if cur.strip():
            out.append(cur.strip())
        return out

    def width(self, r):
        if r in self.regw:
            return self.regw[r][0]
        return self.regw[re.match(r"(.*?)\d+$", r).group(1)][0]


class Sim:
    SH, LOCAL, PARAM, WINDOW = 0x01000000, 0x02000000, 0x03000000, 0x01000000  # generic addresses of what is not global

    def __init__(self, kernel, grid, block, args, buffers, smem=0):
        """args: numbers, in order, pointers as addresses, structs as bytes; buffers: (name, address, bytes) of the memory that
        may be touched."""
        self.k, self.grid, self.block = kernel, tuple(grid) + (1,) * (3 - len(grid)), block
        buffers = sorted(buffers, key=lambda b: b[1])
        self.names = [b[0] for b in buffers]
        self.base = np.array([b[1] for b in buffers] or [0], np.uint64)
        self.end = np.array([b[1] + b[2] for b in buffers] or [0], np.uint64)
        self.memory = [np.ctypeslib.as_array((ctypes.c_uint8 * b[2]).from_address(b[1])) for b in buffers]
        self.writer = [np.full(b[2], -1, np.int32) for b in buffers]  # block that wrote each byte
        pb = bytearray(kernel.pbytes)
        for (_, ty, off, sz), a in zip(kernel.params, list(args) + [0] * (len(kernel.params) - len(args)), strict=True):
            if isinstance(a, bytes):
                v = a
            else:
                v = struct.pack("<d" if ty == "f64" else "<f", a) if isinstance(a, float) else struct.pack("<q", a)
            pb[off : off + sz] = v[:sz].ljust(sz, b"\0")
        self.pb = np.frombuffer(bytes(pb), np.uint8)
        self.poff = {p[0]: p[2] for p in kernel.params}
        self.shsz = kernel.shsize + smem
        #: name -> [bytes read, bytes written]; a byte that several lanes of a block take in one instruction counts once
        self.traffic = {name: [0, 0] for name in self.names}

    def run(self, batch=64):
        n = int(np.prod(self.grid))
        for b in range(0, n, batch):
            self.run_blocks(np.arange(b, min(n, b + batch)))
        return self

    def run_blocks(self, bids):
        import tensor  # which imports this module

        nt = self.block
        T = self.T = len(bids) * nt
        self.tid = np.tile(np.arange(nt, dtype=np.uint32), len(bids))
        self.blk = np.repeat(np.arange(len(bids)), nt)
        self.bid = np.repeat(bids, nt)
        self.R = {}
        self.copies, self.mma = tensor.Copies(self), tensor.mma
        self.sh = np.zeros((len(bids), max(self.shsz, 1)), np.uint8)
        self.init = np.zeros_like(self.sh, bool)
        self.own = np.full((T, self.k.local_size), 0xA5, np.uint8)  # local memory: junk until it is written
        self.wr = np.full(self.sh.shape, -1, np.int64)
        self.rd = np.full(self.sh.shape, -1, np.int64)  # warp that wrote/read since last barrier
        pc = np.zeros(T, np.int64)
        done = np.zeros(T, bool)
        wait = np.full(T, -1, np.int64)
        held = np.zeros(T, bool)  # at a warp collective that other lanes have not reached yet
        code = self.k.code
        while True:
            run = ~done & (wait < 0) & ~held
            if not run.any():
                if done.all():
                    break
                if held.any():
                    txt = code[pc[held][0]][4]
                    raise PtxError(f"warp collective: lanes of its mask are missing   in `{txt}` (block {self.bid[held][0]})")
                for b in np.unique(self.blk[~done]):
                    m = (self.blk == b) & ~done
                    if len(set(wait[m])) != 1:
                        raise PtxError(f"barrier mismatch in block {bids[b]}")
                    wait[m] = -1
                    self.wr[b] = -1
                    self.rd[b] = -1
                continue
            p = pc[run].min()
            a = np.flatnonzero(run & (pc == p))
            if p >= len(code):
                done[a] = True
                continue
            pred, neg, op, ops, txt = code[p]
            if op[0] in ("shfl", "vote", "redux"):
                a = np.flatnonzero((run | held) & (pc == p))
                held[a] = False
            pc[a] = p + 1
            if pred is not None:
                c = self.get(pred, "pred", a)
                a = a[~c if neg else c]
            if a.size == 0:
                continue
            o = op[0]
            if o in ("shfl", "vote", "redux"):
                late = self.late(a, self.get(ops[4 if o == "shfl" else 2], "u32", a))
                held[a[late]], pc[a[late]] = True, p
                a = a[~late]
                if a.size == 0:
                    continue
            if o == "bra":
                pc[a] = self.k.labels[ops[0]]
            elif o in ("ret", "exit"):
                done[a] = True
            elif o in ("bar", "barrier") and "warp" not in op:
                wait[a] = int(ops[0]) if ops and ops[0].isdigit() else 0
            else:
                try:
                    self.step(op, ops, a)
                except PtxError as e:
                    raise PtxError(f"{e}   in `{txt}` (block {self.bid[a[0]]}, {a.size} threads)") from None
                except Exception as e:
                    raise NotImplementedError(f"`{txt}`: {type(e).__name__} {e}") from e

    # ---- operands
    def get(self, s, ty, a):
        w = BITS[ty]
        if s[0] == "!":
            return ~self.get(s[1:], ty, a)
        if s[0] == "{":
            parts = [x.strip() for x in s[1:-1].split(",")]
            pw = w // len(parts)
            r = np.zeros(a.size, RAW[w])
            for i, x in enumerate(parts):
                r |= self.get(x, f"b{pw}", a).astype(RAW[w]) << RAW[w](i * pw)
            return view(r, ty)
        if s.startswith("%") and (s in self.R or "." in s or s[1:] in ("laneid", "warpid")):
            if s in self.R:
                r = self.R[s][a]
            else:
                g = self.grid
                v = {
                    "%tid.x": self.tid,
                    "%ntid.x": self.block,
                    "%ctaid.x": self.bid % g[0],
                    "%ctaid.y": self.bid // g[0] % g[1],
                    "%ctaid.z": self.bid // (g[0] * g[1]),
                    "%nctaid.x": g[0],
                    "%nctaid.y": g[1],
                    "%nctaid.z": g[2],
                    "%laneid": self.tid % 32,
                    "%warpid": self.tid // 32,
                    "%tid.y": 0,
                    "%tid.z": 0,
                    "%ntid.y": 1,
                    "%ntid.z": 1,
                }[s]
                r = (np.broadcast_to(np.asarray(v), (self.T,))[a]).astype(RAW[w])
            if r.dtype != RAW[w] and w > 1:
                r = r.astype(RAW[w])
            return view(r, ty)
        if s in self.R:
            return view(self.R[s][a].astype(RAW[w], copy=False), ty)
        if s.startswith("%") or s in self.k.regw:  # undef lane of a pack (LLVM undef): junk, not zero
            return np.ones(a.size, bool) if w == 1 else view(np.full(a.size, 0xA5C3A5C3A5C3A5C3 & ((1 << w) - 1), RAW[w]), ty)
        if s[:2] in ("0f", "0F"):
            v = np.uint32(int(s[2:], 16))
            return view(np.full(a.size, v).astype(RAW[w]), ty)
        if s[:2] in ("0d", "0D"):
            return view(np.full(a.size, np.uint64(int(s[2:], 16))), ty)
        if re.match(r"-?(0x[0-9a-fA-F]+|\d+)U?$", s):
            v = int(s.rstrip("U"), 0)
            if w == 1:
                return np.full(a.size, bool(v))
            return view(np.full(a.size, v & ((1 << w) - 1), RAW[w]), ty)
        return np.full(a.size, self.sym(s), RAW[w])

    def sym(self, s):
        if s == self.k.dyn:
            return self.SH + self.k.shsize
        if s in self.k.shsyms:
            return self.SH + self.k.shsyms[s]
        if s in self.k.local:
            return self.LOCAL + self.k.local[s]
        if s in self.poff:
            return self.PARAM + self.poff[s]
        raise PtxError(f"unknown symbol {s}")

    def put(self, s, val, ty, a):
        if s == "_":
            return
        if s[0] == "{":
            parts = [x.strip() for x in s[1:-1].split(",")]
            pw = BITS[ty] // len(parts)
            raw = np.ascontiguousarray(val).view(RAW[BITS[ty]])
            for i, x in enumerate(parts):
                self.put(x, (raw >> RAW[BITS[ty]](i * pw)).astype(RAW[pw]), f"b{pw}", a)
            return
        w = self.k.width(s)
        raw = bf_dn(val) if ty == "bf16" and val.dtype == np.float32 else np.ascontiguousarray(val)
        raw = raw if w == 1 else raw.view(RAW[raw.dtype.itemsize * 8])
        if w > 1 and raw.dtype != RAW[w]:
            raw = (raw.view(NP[ty]).astype(np.int64).view(np.uint64) if ty[0] == "s" else raw).astype(RAW[w])
        if s not in self.R:
            self.R[s] = np.zeros(self.T, RAW[w])
        self.R[s][a] = raw

    # ---- memory
    def addr(self, s, a):
        b, _, off = s.strip("[] ").partition("+")
        b, off = b.strip(), int(off.strip() or "0", 0)
        if b in self.poff:
            return "param", self.poff[b] + off
        return "mem", (
            self.get(b, "b64" if b.startswith("%") and self.k.width(b) == 64 else "b32", a).astype(np.int64) + off
        ) if b.startswith("%") else np.full(a.size, self.sym(b) + off)

    def gl(self, ad, n):
        u = ad.astype(np.uint64)
        i = np.searchsorted(self.base, u, "right") - 1
        bad = (i < 0) | (u + np.uint64(n) > self.end[np.maximum(i, 0)])
        if bad.any():
            raise PtxError(f"global access out of bounds: {hex(int(u[bad][0]))}, {bad.sum()} lanes")
        if (u % np.uint64(n)).any():
            raise PtxError(f"misaligned {n}-byte global access")
        return i, (u - self.base[i]).astype(np.int64)

    def shx(self, ad, n, a, write):
        o = ad - self.SH
        if ((o < 0) | (o + n > self.shsz)).any():
            raise PtxError("shared access out of bounds")
        if (o % n).any():
            raise PtxError(f"misaligned {n}-byte shared access")
        idx = (np.repeat(self.blk[a], n), (o[:, None] + np.arange(n)).ravel())
        w = np.repeat(self.tid[a] // 32, n).astype(np.int64)
        if not write and not self.init[idx].all():
            raise PtxError("read of uninitialised shared memory")
        pw, pr = self.wr[idx], self.rd[idx]
        if ((pw >= 0) & (pw != w)).any() or (write and ((pr >= 0) & (pr != w)).any()):
            raise PtxError("shared-memory race between warps (no barrier in between)")
        if write:
            self.init[idx] = True
            self.wr[idx] = w
        else:
            self.rd[idx] = np.where((self.rd[idx] >= 0) & (self.rd[idx] != w), 1 << 40, w)
        return idx

    def space(self, op, ad):
        """The state space of an access: named by the instruction, or by the window that a generic address is in."""
        for name in ("shared", "global", "local", "param"):
            if any(x.startswith(name) for x in op[1:]):
                return name
        windows = np.unique(np.minimum(ad // self.WINDOW, 4))
        if windows.size > 1:
            raise NotImplementedError("a generic access of several state spaces")
        return ("global", "shared", "local", "param", "global")[windows[0]]

    def window(self, ad, base, size, n):
        """Positions of the bytes of an access within a window of memory."""
        o = ad - base
        if ((o < 0) | (o + n > size)).any():
            raise PtxError("access out of the bounds of local memory or parameters")
        if (o % n).any():
            raise PtxError(f"misaligned {n}-byte access of local memory or parameters")
        return o[:, None] + np.arange(n)

    def load(self, space, ad, n, a):
        if space == "shared":
            return self.sh[self.shx(ad, n, a, False)].reshape(a.size, n)
        if space == "param":
            return self.pb[self.window(ad, self.PARAM, self.pb.size, n)]
        if space == "local":
            return self.own[a[:, None], self.window(ad, self.LOCAL, self.k.local_size, n)]
        out = np.empty((a.size, n), np.uint8)
        for b, lanes, at in self.pieces(ad, n, 0, a):
            if ((self.writer[b][at] >= 0) & (self.writer[b][at] != self.bid[a[lanes]][:, None])).any():
                raise PtxError(f"{self.names[b]}: a block reads what another one writes")
            out[lanes] = self.memory[b][at]
        return out

    def store(self, space, ad, byts, a):
        n = byts.shape[1]
        if space == "shared":
            self.sh[self.shx(ad, n, a, True)] = byts.ravel()
            return
        if space == "param":
            raise PtxError("a write to the parameters")
        if space == "local":
            self.own[a[:, None], self.window(ad, self.LOCAL, self.k.local_size, n)] = byts
            return
        for b, lanes, at in self.pieces(ad, n, 1, a):
            owner = self.bid[a[lanes]][:, None]
            if ((self.writer[b][at] >= 0) & (self.writer[b][at] != owner)).any():
                raise PtxError(f"{self.names[b]}: two blocks write the same place")
            self.writer[b][at] = owner
            self.memory[b][at] = byts[lanes]

    def pieces(self, ad, n, written, a):
        """(buffer, lanes, byte positions) of an access, counted."""
        i, o = self.gl(ad, n)
        for b in np.unique(i):
            lanes = np.flatnonzero(i == b)
            self.traffic[self.names[b]][written] += n * len(np.unique(np.stack([self.blk[a[lanes]], o[lanes]]), axis=1).T)
            yield b, lanes, o[lanes][:, None] + np.arange(n)

    # ---- one instruction for active lanes a
    def step(self, op, ops, a):
        o, ty = op[0], op[-1]
        if op[:2] == ["cp", "async"]:
            return self.copies.step(op, ops, a)
        if o == "mma":
            return self.mma(self, op, ops, a)
        for x in op[1:]:
            if x not in BITS and x.split("::")[0] not in KNOWN:
                raise NotImplementedError(f"modifier .{x}")
        if ty not in BITS:
            ty = next((x for x in reversed(op) if x in BITS), "b32")
        nb = BITS[ty] // 8
        tys = [x for x in op[1:] if x in BITS]
        if len(tys) > 1 and o != "cvt":
            if o in ("add", "sub", "fma") and tys[0] == "f32" and tys[1] in ("bf16", "f16"):  # mixed precision, sm_100+
                lowp = 2 if o == "fma" else 1
                v = [self.get(x, tys[1] if i < lowp else "f32", a).astype(np.float64) for i, x in enumerate(ops[1:])]
                self.put(
                    ops[0],
                    (v[0] + v[1] if o == "add" else v[0] - v[1] if o == "sub" else v[0] * v[1] + v[2]).astype(np.float32),
                    "f32",
                    a,
                )
                return
            raise NotImplementedError("two types")
        G = lambda i, t=ty: self.get(ops[i], t, a)
        P = lambda v, t=ty: self.put(ops[0], v, t, a)
        if o in ("ld", "ldu"):
            kind, ad = self.addr(ops[1], a)
            vec = 4 if "v4" in op else 2 if "v2" in op else 8 if "v8" in op else 1
            if kind == "param":
                by = np.broadcast_to(self.pb[ad : ad + nb * vec], (a.size, nb * vec))
            else:
                by = self.load(self.space(op, ad), ad, nb * vec, a)
            ds = [x.strip() for x in ops[0].strip("{}").split(",")] if vec > 1 else [ops[0]]
            for j, d in enumerate(ds):
                self.put(
                    d,
                    np.ascontiguousarray(by[:, j * nb : (j + 1) * nb]).view(RAW[BITS[ty]]).ravel().view(NP.get(ty, np.uint16)),
                    ty,
                    a,
                )
        elif o == "st":
            _, ad = self.addr(ops[0], a)
            vec = 4 if "v4" in op else 2 if "v2" in op else 8 if "v8" in op else 1
            ss = [x.strip() for x in ops[1].strip("{} ").split(",")] if vec > 1 else [ops[1]]
            by = np.concatenate(
                [np.ascontiguousarray(self.get(s, f"b{nb * 8}", a)).view(np.uint8).reshape(a.size, nb) for s in ss], 1
            )
            self.store(self.space(op, ad), ad, by, a)
        elif o in ("mov", "cvta"):
            if ops[0][0] == "{" or ops[1][0] == "{":
                self.put(ops[0], self.get(ops[1], ty, a), ty, a)
            else:
                P(G(1))
        elif o == "shfl":
            mode, lane, m = op[2], self.tid[a] % 32, self.get(ops[4], "u32", a)
            d, _, pd = ops[0].partition("|")
            v, b, c = self.get(ops[1], "b32", a), self.get(ops[2], "u32", a), self.get(ops[3], "u32", a)
            self.check(a, m)
            full = np.zeros(self.T, np.uint32)
            full[a] = v
            seg = (c >> 8) & 31
            cl = c & 31
            mx = (lane & seg) | (cl & ~seg)
            mn = lane & seg
            li = lane.astype(np.int64)
            src = {"bfly": li ^ b, "idx": mn | (b & ~seg & 31), "down": li + b, "up": li - b}[mode]
            ok = (src <= mx) if mode != "up" else (src >= mn if True else src)
            src = np.where(ok, src, li)
            self.put(d, full[a - li + src], "b32", a)
            if pd:
                self.put(pd, ok, "pred", a)
        elif o == "redux":
            m = self.get(ops[2], "u32", a)
            self.check(a, m)
            v = G(1)
            w = a // 32
            r = v.copy()
            f = {
                "add": np.sum,
                "max": np.max,
                "min": np.min,
                "and": np.bitwise_and.reduce,
                "or": np.bitwise_or.reduce,
                "xor": np.bitwise_xor.reduce,
            }[op[2]]
            if ty == "f32" and "NaN" not in op:  # NaN does not take part
                f = {"max": np.fmax.reduce, "min": np.fmin.reduce}[op[2]]
            for x in np.unique(w):
                r[w == x] = f(v[w == x]).astype(v.dtype)
            P(r)
        elif o in ("vote", "activemask"):
            p = self.get(ops[1], "pred", a) if o == "vote" else np.ones(a.size, bool)
            r = np.zeros(a.size, np.uint32)
            w = a // 32
            for x in np.unique(w):
                s = w == x
                bal = int(sum(1 << int(lane) for lane in (self.tid[a][s] % 32)[p[s]]))
                r[s] = bal if "ballot" in op or o == "activemask" else {"any": p[s].any(), "all": p[s].all()}[op[2]]
            self.put(
                ops[0],
                r if "ballot" in op or o == "activemask" else r.astype(bool),
                "b32" if "ballot" in op or o == "activemask" else "pred",
                a,
            )
        elif o in ("ldmatrix", "stmatrix"):
            self.matrix(o, op, ops, a)
        elif o in ("membar", "fence", "prefetch", "griddepcontrol", "nanosleep", "bar", "discard", "applypriority"):
            pass
        elif o == "setp" and ty in ("f16x2", "bf16x2"):  # both halves, a predicate each
            for half, to in enumerate(ops[0].split("|")):
                x, y = (view((G(i, "b32") >> np.uint32(16 * half)).astype(np.uint16), ty[:-2]) for i in (1, 2))
                self.put(to, compared(op[1], x, y), "pred", a)
        elif o == "setp":
            r = compared(op[1], G(1), G(2))
            if len(ops) > 3:
                z = self.get(ops[3], "pred", a)
                r = {"and": r & z, "or": r | z, "xor": r ^ z}[op[2]]
            self.put(ops[0].split("|")[0], np.broadcast_to(r, (a.size,)), "pred", a)
        elif o == "selp":
            P(np.where(self.get(ops[3], "pred", a), G(1), G(2)))
        elif o == "cvt":
            d, s = [x for x in op if x in BITS][:2]
            if d in ("bf16x2", "f16x2"):  # the first operand is the upper half
                high, low = (self.get(x, s, a) for x in ops[1:3])
                halves = [bf_dn(v) if d == "bf16x2" else v.astype(np.float16).view(np.uint16) for v in (high, low)]
                self.put(ops[0], halves[0].astype(np.uint32) << np.uint32(16) | halves[1], "b32", a)
                return
            v = self.get(ops[1], s, a)
            if d == "bf16" or NP[d](0).dtype.kind == "f":
                r = v.astype(np.float32 if d == "bf16" else NP[d])
            else:
                if v.dtype.kind == "f":
                    v = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[
                        next(x for x in op if x in ("rni", "rzi", "rmi", "rpi"))
                    ](v.astype(np.float64))
                    ii = np.iinfo(NP[d])
                    v = np.clip(np.nan_to_num(v), ii.min, ii.max)
                    r = v.astype(NP[d])
                else:
                    r = v.astype(NP[d])
            if any(x in op for x in ("rmi", "rpi", "rzi", "rni")) and r.dtype.kind == "f":
                r = {"rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc, "rni": np.rint}[
                    next(x for x in op if x in ("rmi", "rpi", "rzi", "rni"))
                ](r)
            if "sat" in op:
                if d != "f32":
                    raise NotImplementedError("saturation")
                r = np.where(np.isnan(r), np.float32(0), np.clip(r, np.float32(0), np.float32(1)))
            if s == "f64" and d == "f32" and any(x in op for x in ("rz", "rm", "rp")):
                r = directed(v, op)
            self.put(ops[0], r, d, a)
        elif ty == "f32x2":
            xs = [G(i, "b64") for i in range(1, len(ops))]
            h = [(x.view(np.uint32).reshape(-1, 2).copy().view(np.float32)) for x in xs]
            r = {
                "add": lambda: h[0] + h[1],
                "sub": lambda: h[0] - h[1],
                "mul": lambda: h[0] * h[1],
                "fma": lambda: (h[0].astype(np.float64) * h[1] + h[2]).astype(np.float32),
            }[o]()
            self.put(ops[0], np.ascontiguousarray(r).view(np.uint64).ravel(), "b64", a)
        elif o in ("mad", "fma") or (o == "mul" and "wide" in op):
            x, y = G(1), G(2)
            if ty[0] == "f":
                r = fused(x, y, G(3))
                if any(m in op for m in ("rz", "rm", "rp")):
                    if ty != "f32":
                        raise NotImplementedError("rounding")
                    P(directed(r, op))
                else:
                    P(np.clip(r, 0, 1).astype(x.dtype) if "sat" in op else r.astype(x.dtype))
            elif "wide" in op:
                wt = ty[0] + str(BITS[ty] * 2)
                r = x.astype(NP[wt]) * y.astype(NP[wt])
                self.put(ops[0], r + self.get(ops[3], wt, a) if o == "mad" else r, wt, a)
            elif "hi" in op:
                P(high(x, y) + G(3))
            else:
                P(x * y + G(3))
        elif o in ("shl", "shr"):
            s = self.get(ops[2], "u32", a).astype(np.int64)
            n = BITS[ty]
            x = G(1)
            big = s >= n
            s = np.minimum(s, n - 1).astype(x.dtype)
            P(
                np.where(
                    big, 0 if (o == "shl" or ty[0] != "s") else x >> x.dtype.type(n - 1), x << s if o == "shl" else x >> s
                ).astype(x.dtype)
            )
        elif o == "bfe":
            x = G(1)
            p = self.get(ops[2], "u32", a).astype(np.int64) & 255
            length = self.get(ops[3], "u32", a).astype(np.int64) & 255
            X = x.astype(object)
            n = BITS[ty]
            out = []
            for xi, pi, li in zip(X, p, length, strict=True):
                xi &= (1 << n) - 1
                v = (xi >> int(pi)) & ((1 << int(li)) - 1)
                if ty[0] == "s" and li and v >> (int(li) - 1) & 1:
                    v |= ((1 << n) - 1) & ~((1 << int(li)) - 1)
                out.append(v)
            P(np.array(out, RAW[n]).view(NP[ty]))
        elif o == "prmt":
            x, y, s = G(1, "u32"), G(2, "u32"), G(3, "u32")
            bs = np.concatenate([x.view(np.uint8).reshape(-1, 4), y.view(np.uint8).reshape(-1, 4)], 1)
            r = np.zeros((a.size, 4), np.uint8)
            for j in range(4):
                k = (s >> (4 * j)) & 15
                b = bs[np.arange(a.size), k & 7]
                r[:, j] = np.where(k & 8, np.where(b & 128, 255, 0), b)
            P(r.view(np.uint32).ravel(), "b32")
        elif o == "lop3":
            x, y, z = G(1, "u32"), G(2, "u32"), G(3, "u32")
            lut = int(ops[4], 0)
            r = np.zeros(a.size, np.uint32)
            for j in range(8):
                if lut >> j & 1:
                    r |= (x if j & 4 else ~x) & (y if j & 2 else ~y) & (z if j & 1 else ~z)
            P(r, "b32")
        elif o == "bmsk":
            x = G(1, "u32").astype(np.uint64)
            n = G(2, "u32").astype(np.uint64)
            P((((np.uint64(1) << n) - np.uint64(1)) << x).astype(np.uint32), "b32")
        elif o == "popc":
            P(np.array([bin(int(v)).count("1") for v in G(1)], np.uint32), "b32")
        elif o == "clz":
            P(np.array([BITS[ty] - int(v).bit_length() for v in G(1)], np.uint32), "b32")
        else:
            x = G(1)
            y = G(2) if len(ops) > 2 else None
            z = x.dtype.type(0)
            tf = x.dtype.type
            un = {
                "neg": lambda: -x,
                "abs": lambda: np.abs(x),
                "not": lambda: ~x,
                "ex2": lambda: np.exp2(x),
                "lg2": lambda: np.log2(x),
                "rcp": lambda: tf(1) / x,
                "sqrt": lambda: np.sqrt(x),
                "rsqrt": lambda: tf(1) / np.sqrt(x),
                "sin": lambda: np.sin(x),
                "cos": lambda: np.cos(x),
                "tanh": lambda: np.tanh(x),
            }
            bi = {
                "add": lambda: x + y,
                "sub": lambda: x - y,
                "mul": lambda: x * y if "hi" not in op else high(x, y),
                "and": lambda: x & y,
                "or": lambda: x | y,
                "xor": lambda: x ^ y,
                "max": lambda: (np.maximum if "NaN" in op else np.fmax)(x, y) if x.dtype.kind == "f" else np.maximum(x, y),
                "min": lambda: (np.minimum if "NaN" in op else np.fmin)(x, y) if x.dtype.kind == "f" else np.minimum(x, y),
                "div": lambda: x / y if x.dtype.kind == "f" else np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y)),
                "copysign": lambda: np.copysign(y, x),
                "rem": lambda: np.fmod(x, y),
            }
            if o in ("max", "min") and len(ops) == 4:  # 3-input form, PTX 8.8 / sm_100+
                y0, y = y, None
                keeps_nan = "NaN" in op or x.dtype.kind != "f"
                x = {"max": np.maximum if keeps_nan else np.fmax, "min": np.minimum if keeps_nan else np.fmin}[o](x, y0)
                y = G(3)
                ops = ops[:3]
            if len(ops) != (2 if o in un else 3):
                raise NotImplementedError("operand count")
            if any(m in op for m in ("rz", "rm", "rp")):
                if ty != "f32" or o not in ("add", "sub", "mul"):
                    raise NotImplementedError("rounding")
                x, y = x.astype(np.float64), y.astype(np.float64)
                P(directed(bi[o](), op))
                return
            if "sat" in op:
                raise NotImplementedError("saturation")
            r = (un if o in un else bi)[o]()
            if "ftz" in op and r.dtype == np.float32:
                r = np.where(np.abs(r) < np.float32(1.1754944e-38), np.copysign(np.float32(0), r), r)
            P(np.asarray(r).astype(x.dtype, copy=False))

    def matrix(self, o, op, ops, a):
        """8 x 8 matrices of 16 bits: lanes 8 j ... 8 j + 7 give the addresses of the rows of matrix j."""
        count = int(op[op.index("m8n8") + 1][1])
        _, ad = self.addr(ops[1] if o == "ldmatrix" else ops[0], a)
        registers = [x.strip() for x in (ops[0] if o == "ldmatrix" else ops[1]).strip("{} ").split(",")]
        self.check(a, np.full(a.size, 0xFFFFFFFF, np.uint32))
        used = (self.tid[a] % 32) < 8 * count
        lane = np.arange(32)
        row, pair = lane // 4, 2 * (lane % 4)
        cells = [(pair, row), (pair + 1, row)] if "trans" in op else [(row, pair), (row, pair + 1)]  # low and high half
        rows = np.zeros((a.size, 16), np.uint8)
        if o == "ldmatrix":
            rows[used] = self.load("shared", ad[used], 16, a[used])
        matrices = rows.view(np.uint16).reshape(-1, 32, 8)  # warp, lane that gave the address, column
        for j, register in enumerate(registers):
            m = matrices[:, 8 * j : 8 * j + 8]
            if o == "ldmatrix":
                low, high = (m[:, i, k].astype(np.uint32) for i, k in cells)
                self.put(register, (low | high << np.uint32(16)).ravel(), "b32", a)
            else:
                value = self.get(register, "b32", a).reshape(-1, 32)
                for half, (i, k) in enumerate(cells):
                    m[:, i, k] = (value >> np.uint32(16 * half)).astype(np.uint16)
        if o == "stmatrix":
            self.store("shared", ad[used], rows[used], a[used])

    def late(self, a, m):
        """Which of the lanes a have to wait, because lanes of their masks m are not among them."""
        here = np.zeros(-(-self.T // 32), np.uint32)
        lane = (a % 32).astype(np.uint32)
        np.bitwise_or.at(here, a // 32, np.uint32(1) << lane)
        there = np.uint32((1 << (self.T % 32)) - 1) if self.T % 32 else np.uint32(0xFFFFFFFF)  # lanes of the last warp
        m = np.where(a // 32 == here.size - 1, m & there, m)
        if ((m >> lane) & 1 == 0).any():
            raise PtxError("warp collective: a lane is not in its own mask")
        return (m & ~here[a // 32]) != 0

    def check(self, a, m):
        if self.late(a, m).any():
            raise PtxError("warp collective: lanes of its mask are missing")
