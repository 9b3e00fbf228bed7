// Norm and activation of one image or a part of it, in as few passes over memory as possible:
//
//     moments     read x
//     forward     read x, write y
//     sums        read g, x               (backward pass)
//     gradient    read g, x, write dx     (backward pass)
//
// The values between norm and activation, which PyTorch stores, are computed again:
//
//     z = scale * (x - pivot) + bias,   y = z > 0 ? z : slope * z,   g' = z > 0 ? g : slope * g
//
// A tensor is a set of runs of contiguous values. With channels last, a run is a row of pixels with
// all their channels; otherwise it is a row of one channel. With channels last, parameters are
// expanded to a period that repeats along a run; otherwise a run has one value of each parameter.
// So both layouts use the same inner loops, whose lengths are multiples of a vector for any number
// of channels.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

using std::int64_t;

struct BFloat16 {
    uint16_t bits;
};

static inline float load(const float* x, int64_t i) { return x[i]; }
static inline double load(const double* x, int64_t i) { return x[i]; }
static inline float load(const BFloat16* x, int64_t i) {
    uint32_t bits = uint32_t(x[i].bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline void store(float* y, int64_t i, float v) { y[i] = v; }
static inline void store(double* y, int64_t i, double v) { y[i] = v; }
static inline void store(BFloat16* y, int64_t i, float v) {  // rounds to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    y[i].bits = v != v ? 0x7fc0 : uint16_t(rounded);
}

template <class T> struct Wider { using type = float; };
template <> struct Wider<double> { using type = double; };
template <class T> using Accumulated = typename Wider<T>::type;

extern "C" {
// Sizes of a part of a feature map, and the box of its owned cells.
struct Shape {
    int64_t channels, depth, height, width;
    int64_t channels_last;
    int64_t own[6];  // begin and end along depth, height, width
    int64_t threads;
};
// Strides of a tensor of that shape, in values. With channels last `channel` is not used.
struct Strides {
    int64_t channel, plane, row;
};
}

static const int64_t FLUSH = 256;  // number of periods that are added in the narrow type
static const int64_t GROUP = 1024;  // number of values up to which short runs are grouped

struct Runs {
    const Shape& s;
    int64_t rows, count, period;
    int64_t lanes;  // values of a period that are used: short rows of one channel do not fill it
    explicit Runs(const Shape& s) : s(s), rows(s.depth * s.height), count(s.channels_last ? rows : rows * s.channels) {
        period = s.channels_last ? std::lcm(s.channels, int64_t(16)) : 32;
        if (s.channels_last && period < 64) period *= (64 + period - 1) / period;
        lanes = s.channels_last ? period : std::min(period, s.width);
    }
    int64_t values(int64_t pixels) const { return s.channels_last ? pixels * s.channels : pixels; }
};

// One run. The next one is found by `advance`: a division would take as long as a short run.
struct Run {
    const Shape& s;
    int64_t channel, plane, row;  // channel is 0 with channels last
    Run(const Runs& runs, int64_t number) : s(runs.s), channel(number / runs.rows), plane(number % runs.rows / runs.s.height), row(number % runs.rows % runs.s.height) {}
    void advance() {
        if (++row < s.height) return;
        row = 0;
        if (++plane < s.depth) return;
        plane = 0, ++channel;
    }
    int64_t offset(const Strides& t) const { return channel * t.channel + plane * t.plane + row * t.row; }
    bool owned() const { return s.own[0] <= plane && plane < s.own[1] && s.own[2] <= row && row < s.own[3]; }
};

// Parameter of channels in the form of the inner loops: a period of values, or one value.
template <class A> struct Parameter {
    const A* of_channel;
    std::vector<A> values;
    Parameter(const Runs& runs, const A* of_channel) : of_channel(of_channel), values(runs.s.channels_last ? runs.period : 0) {
        for (size_t j = 0; j < values.size(); ++j) values[j] = of_channel[int64_t(j) % runs.s.channels];
    }
};
template <class A> struct One {
    A value;
    A operator[](int64_t) const { return value; }
};

// Call ``f`` with the parameters of a run of channel ``c``.
template <class F, class... A> static inline void with(const Runs& runs, int64_t c, F f, const Parameter<A>&... parameters) {
    if (runs.s.channels_last) f(parameters.values.data()...);
    else f(One<A>{parameters.of_channel[c]}...);
}

template <class F> static void each_thread(const Runs& runs, F work) {
    int64_t threads = std::max<int64_t>(1, std::min(runs.s.threads, runs.count));
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t t = 0; t < threads; ++t) work(t, runs.count * t / threads, runs.count * (t + 1) / threads);
}

// Call ``f`` with the first run of each group and the number of its runs. They are neighbours in a
// plane and all owned or all not. Short runs in groups save the cost of a call for each.
template <class F> static inline void each_group(const Runs& runs, int64_t first, int64_t last, F f) {
    const Shape& s = runs.s;
    const int64_t most = std::max<int64_t>(1, GROUP / std::max<int64_t>(1, runs.values(s.width)));
    Run run(runs, first);
    for (int64_t r = first; r < last;) {
        int64_t end = run.row < s.own[2] ? s.own[2] : run.row < s.own[3] ? s.own[3] : s.height;
        int64_t count = std::min({last - r, most, std::min(end, s.height) - run.row});
        f(run, count);
        r += count, run.row += count - 1;
        run.advance();
    }
}

// Call ``f`` with the number of a row, its first value and a length, for all blocks of rows of ``n``
// values. ``P`` is the form of the parameters. The usual lengths of one channel's rows are constants
// of the compiler's.
template <class P, class F> static inline void each_block(int64_t rows, int64_t n, int64_t period, F f) {
    auto of = [&](auto length) {
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < n; i += length) f(r, i, length);
    };
    if constexpr (!std::is_pointer<P>::value) {
        if (n % 32 == 0) return of(std::integral_constant<int64_t, 32>());
        if (n == 16) return of(std::integral_constant<int64_t, 16>());
        if (n == 4) return of(std::integral_constant<int64_t, 4>());
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; i += period) f(r, i, std::min(period, n - i));
}

// ---- moments -------------------------------------------------------------------------------------------------------

// Mean and sum of squared deviations of each channel, combined without cancellation
// (Chan, Golub, LeVeque 1979).
struct Moments {
    std::vector<double> count, mean, m2;
    explicit Moments(int64_t channels) : count(channels), mean(channels), m2(channels) {}
    void join(int64_t c, double n, double other_mean, double other_m2) {
        if (n == 0) return;
        double total = count[c] + n, delta = other_mean - mean[c];
        m2[c] += other_m2 + delta * delta * (count[c] * n / total);
        mean[c] += delta * (n / total);
        count[c] = total;
    }
};

template <class T, class A, class P>
static void add_moments(const T* x, int64_t rows, int64_t stride, int64_t n, int64_t period, P pivot, A* __restrict s1, A* __restrict s2) {
    each_block<P>(rows, n, period, [=](int64_t r, int64_t i, auto length) {
        const T* from = x + r * stride + i;
#pragma omp simd
        for (int64_t j = 0; j < length; ++j) {
            A v = load(from, j) - pivot[j];
            s1[j] += v;
            s2[j] += v * v;
        }
    });
}

// Sums of x - pivot and its square. The pivot is the running mean, so a large mean costs no digits.
template <class T, class A> struct MomentsOfRuns {
    const Runs& runs;
    Moments found;
    std::vector<A> pivot, s1, s2;
    int64_t pixels = 0, channel = 0;
    explicit MomentsOfRuns(const Runs& runs) : runs(runs), found(runs.s.channels), pivot(runs.period), s1(runs.period), s2(runs.period) {}

    void add(const T* x, int64_t rows, int64_t stride, int64_t width, int64_t c) {
        if (c != channel) flush();
        channel = c;
        int64_t whole = runs.values(width), step = FLUSH * runs.period;
        for (int64_t i = 0; i < whole; i += step) {
            if (pixels == 0) take_pivot(x + i);
            int64_t n = std::min(step, whole - i);
            if (runs.s.channels_last) add_moments(x + i, rows, stride, n, runs.period, pivot.data(), s1.data(), s2.data());
            else add_moments(x + i, rows, stride, n, runs.period, One<A>{pivot[0]}, s1.data(), s2.data());
            pixels += rows * (runs.s.channels_last ? n / runs.s.channels : n);
            if (runs.values(pixels) >= step) flush();
        }
    }
    void take_pivot(const T* x) {
        for (int64_t j = 0; j < (runs.s.channels_last ? runs.lanes : 1); ++j) {
            int64_t c = runs.s.channels_last ? j % runs.s.channels : channel;
            pivot[j] = found.count[c] > 0 ? A(found.mean[c]) : load(x, runs.s.channels_last ? c : 0);
        }
    }
    void flush() {
        if (pixels == 0) return;
        int64_t first = runs.s.channels_last ? 0 : channel, apart = runs.s.channels_last ? runs.s.channels : 1;
        for (int64_t c = 0; c < apart; ++c) {
            double a = 0, b = 0;
            for (int64_t j = c; j < runs.lanes; j += apart) a += s1[j], b += s2[j];
            found.join(first + c, pixels, double(pivot[c]) + a / pixels, std::max(0.0, b - a * a / pixels));
        }
        std::fill_n(s1.begin(), runs.lanes, A(0));
        std::fill_n(s2.begin(), runs.lanes, A(0));
        pixels = 0;
    }
};

template <class T> static void moments(const Shape& s, const Strides& sx, const T* x, double* mean, double* m2) {
    using A = Accumulated<T>;
    Runs runs(s);
    std::vector<MomentsOfRuns<T, A>> parts(std::max<int64_t>(1, s.threads), MomentsOfRuns<T, A>(runs));
    each_thread(runs, [&](int64_t t, int64_t first, int64_t last) {
        each_group(runs, first, last, [&](const Run& run, int64_t rows) {
            if (run.owned()) parts[t].add(x + run.offset(sx) + runs.values(s.own[4]), rows, sx.row, s.own[5] - s.own[4], run.channel);
        });
        parts[t].flush();
    });
    Moments all(s.channels);
    for (auto& part : parts)
        for (int64_t c = 0; c < s.channels; ++c) all.join(c, part.found.count[c], part.found.mean[c], part.found.m2[c]);
    std::copy(all.mean.begin(), all.mean.end(), mean);
    std::copy(all.m2.begin(), all.m2.end(), m2);
}

// ---- forward -------------------------------------------------------------------------------------------------------

template <class T, class A, class P>
static void normalise(const T* x, T* y, int64_t rows, int64_t stride_x, int64_t stride_y, int64_t n, int64_t period, P pivot, P scale, P bias, A slope) {
    each_block<P>(rows, n, period, [=](int64_t r, int64_t i, auto length) {
        const T* from = x + r * stride_x + i;
        T* to = y + r * stride_y + i;
#pragma omp simd
        for (int64_t j = 0; j < length; ++j) {
            A z = (load(from, j) - pivot[j]) * scale[j] + bias[j];
            store(to, j, z > 0 ? z : slope * z);
        }
    });
}

template <class T, class A>
static void forward(const Shape& s, const Strides& sx, const Strides& sy, const T* x, T* y, const A* pivot, const A* scale, const A* bias, double slope) {
    Runs runs(s);
    each_thread(runs, [&](int64_t, int64_t first, int64_t last) {
        Parameter<A> p(runs, pivot), a(runs, scale), b(runs, bias);
        int64_t n = runs.values(s.width);
        each_group(runs, first, last, [&](const Run& run, int64_t rows) {
            auto part = [&](auto p, auto a, auto b) { normalise(x + run.offset(sx), y + run.offset(sy), rows, sx.row, sy.row, n, s.channels_last ? runs.period : n, p, a, b, A(slope)); };
            with(runs, run.channel, part, p, a, b);
        });
    });
}

// ---- backward ------------------------------------------------------------------------------------------------------

template <class T, class A, class P>
static void add_sums(const T* g, const T* x, int64_t rows, int64_t stride_g, int64_t stride_x, int64_t n, int64_t period, P pivot, P scale, P bias, A slope, A* __restrict s1, A* __restrict s2) {
    each_block<P>(rows, n, period, [=](int64_t r, int64_t i, auto length) {
        const T *from_g = g + r * stride_g + i, *from_x = x + r * stride_x + i;
#pragma omp simd
        for (int64_t j = 0; j < length; ++j) {
            A d = load(from_x, j) - pivot[j], v = load(from_g, j);
            v = d * scale[j] + bias[j] > 0 ? v : slope * v;
            s1[j] += v;
            s2[j] += v * d;
        }
    });
}

// Sums of g' and of g' * (x - pivot) of each channel, over all cells, owned or not.
template <class T, class A>
static void sums(const Shape& s, const Strides& sg, const Strides& sx, const T* g, const T* x, const A* pivot, const A* scale, const A* bias, double slope, double* sum, double* weighted) {
    Runs runs(s);
    int64_t threads = std::max<int64_t>(1, s.threads);
    std::vector<std::vector<double>> parts(threads, std::vector<double>(2 * s.channels));
    each_thread(runs, [&](int64_t t, int64_t first, int64_t last) {
        Parameter<A> p(runs, pivot), a(runs, scale), b(runs, bias);
        std::vector<A> s1(runs.period), s2(runs.period);
        int64_t added = 0, channel = 0, apart = s.channels_last ? s.channels : 1, whole = runs.values(s.width), step = FLUSH * runs.period;
        auto flush = [&] {
            for (int64_t c = 0; c < apart; ++c) {
                double total = 0, other = 0;
                for (int64_t j = c; j < runs.lanes; j += apart) total += s1[j], other += s2[j], s1[j] = s2[j] = 0;
                parts[t][channel + c] += total, parts[t][s.channels + channel + c] += other;
            }
            added = 0;
        };
        each_group(runs, first, last, [&](const Run& run, int64_t rows) {
            if (run.channel != channel) flush();
            channel = run.channel;
            const T *gr = g + run.offset(sg), *xr = x + run.offset(sx);
            for (int64_t i = 0; i < whole; i += step) {
                int64_t n = std::min(step, whole - i);
                with(runs, channel, [&](auto p, auto a, auto b) { add_sums(gr + i, xr + i, rows, sg.row, sx.row, n, runs.period, p, a, b, A(slope), s1.data(), s2.data()); }, p, a, b);
                added += rows * n;
                if (added >= step) flush();
            }
        });
        flush();
    });
    for (int64_t c = 0; c < s.channels; ++c) {
        sum[c] = weighted[c] = 0;
        for (auto& part : parts) sum[c] += part[c], weighted[c] += part[s.channels + c];
    }
}

template <class T, class A, class P>
static void add_gradient(const T* g, const T* x, T* dx, int64_t rows, int64_t stride_g, int64_t stride_x, int64_t stride_d, int64_t n, int64_t period, P pivot, P scale, P bias, A slope, P tilt, P shift) {
    each_block<P>(rows, n, period, [=](int64_t r, int64_t i, auto length) {
        const T *from_g = g + r * stride_g + i, *from_x = x + r * stride_x + i;
        T* to = dx + r * stride_d + i;
#pragma omp simd
        for (int64_t j = 0; j < length; ++j) {
            A d = load(from_x, j) - pivot[j], v = load(from_g, j);
            v = d * scale[j] + bias[j] > 0 ? v : slope * v;
            store(to, j, v * scale[j] + (d * tilt[j] + shift[j]));
        }
    });
}

// dx = scale * g', and on owned cells + tilt * (x - pivot) + shift.
template <class T, class A>
static void gradient(const Shape& s, const Strides& sg, const Strides& sx, const Strides& sd, const T* g, const T* x, T* dx, const A* pivot, const A* scale, const A* bias, double slope, const A* tilt, const A* shift) {
    Runs runs(s);
    std::vector<A> zeros(s.channels);
    each_thread(runs, [&](int64_t, int64_t first, int64_t last) {
        Parameter<A> p(runs, pivot), a(runs, scale), b(runs, bias), k(runs, tilt), h(runs, shift), none(runs, zeros.data());
        each_group(runs, first, last, [&](const Run& r, int64_t rows) {
            auto part = [&](int64_t begin, int64_t end, const Parameter<A>& tilt, const Parameter<A>& shift) {
                int64_t i = runs.values(begin), n = runs.values(end - begin);
                auto run = [&](auto p, auto a, auto b, auto k, auto h) {
                    add_gradient(g + r.offset(sg) + i, x + r.offset(sx) + i, dx + r.offset(sd) + i, rows, sg.row, sx.row, sd.row, n, s.channels_last ? runs.period : n, p, a, b, A(slope), k, h);
                };
                if (n > 0) with(runs, r.channel, run, p, a, b, tilt, shift);
            };
            int64_t begin = r.owned() ? s.own[4] : s.width, end = r.owned() ? s.own[5] : s.width;
            part(0, begin, none, none);
            part(begin, end, k, h);
            part(end, s.width, none, none);
        });
    });
}

// ---- whole maps ----------------------------------------------------------------------------------------------------

extern "C" {
// Settings of a norm of whole images that this process holds alone.
struct Norm {
    int64_t images, groups;  // groups of channels that share statistics; 0: each channel has its own
    int64_t joint;           // all images share statistics, as in batch norm
    double eps, slope;
    double p;                // probability of the channel dropout before the norm
};
}

// Number in [0, 1) of the keyed generator (distseg/tiling/rng.py).
static inline double uniform(uint64_t key, uint64_t position) {
    uint64_t z = key + 0x9E3779B97F4A7C15u * (position + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z = z ^ (z >> 31);
    return double(z >> 11) * 0x1p-53;
}

// Coefficients of one image: y by pivot, scale and bias; xhat = hat * (x - pivot) + offset.
struct Numbers {
    double *pivot, *scale, *bias, *hat, *offset;
    Numbers(double* numbers, int64_t image, int64_t channels) {
        double* own = numbers + 5 * channels * image;
        pivot = own, scale = own + channels, bias = own + 2 * channels, hat = own + 3 * channels, offset = own + 4 * channels;
    }
};

template <class A> static std::vector<A> narrowed(const double* values, int64_t n) { return std::vector<A>(values, values + n); }

// Combines the moments of the images' channels to mean and m2 (rows, statistics). A joint norm has
// one row, any other norm one row per image.
static double joined(const Norm& n, int64_t channels, double pixels, const std::vector<double>& means, const std::vector<double>& m2s, double* mean, double* m2) {
    int64_t rows = n.joint ? 1 : n.images, parts = n.joint ? n.images : 1, groups = n.groups ? n.groups : channels, width = channels / groups;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t k = 0; k < groups; ++k) {
            double sum = 0, squares = 0;
            auto each = [&](auto f) {
                for (int64_t i = 0; i < parts; ++i)
                    for (int64_t c = k * width; c < (k + 1) * width; ++c) f((row * parts + i) * channels + c);
            };
            each([&](int64_t at) { sum += means[at]; });
            double middle = sum / (parts * width);
            each([&](int64_t at) { squares += m2s[at] + pixels * (means[at] - middle) * (means[at] - middle); });
            mean[row * groups + k] = middle, m2[row * groups + k] = squares;
        }
    return pixels * parts * width;
}

template <class T, class A>
static void norm_forward(const Shape& s, const Norm& n, const Strides& sx, const Strides& sy, int64_t bx, int64_t by, const T* x, T* y, const uint64_t* keys, const A* weight, const A* bias, double* mean, double* m2, double* numbers) {
    int64_t channels = s.channels, width = n.groups ? channels / n.groups : 1, statistics = channels / width;
    std::vector<double> means(n.images * channels), m2s(n.images * channels), masks(n.images * channels, 1.0);
    for (int64_t b = 0; b < n.images; ++b) {
        moments(s, sx, x + b * bx, &means[b * channels], &m2s[b * channels]);
        for (int64_t c = 0; keys && c < channels; ++c) {
            double m = uniform(keys[b], c) >= n.p ? 1 / (1 - n.p) : 0.0;
            masks[b * channels + c] = m, means[b * channels + c] *= m, m2s[b * channels + c] *= m * m;
        }
    }
    double count = joined(n, channels, double(s.depth * s.height * s.width), means, m2s, mean, m2);
    for (int64_t b = 0; b < n.images; ++b) {
        Numbers f(numbers, b, channels);
        for (int64_t c = 0; c < channels; ++c) {
            int64_t k = (n.joint ? 0 : b * statistics) + c / width;
            double m = masks[b * channels + c], r = 1 / std::sqrt(m2[k] / count + n.eps), w = weight ? weight[c] : 1.0;
            f.pivot[c] = m > 0 ? mean[k] / m : 0.0;
            f.offset[c] = m > 0 ? 0.0 : -mean[k] * r;
            f.hat[c] = m * r;
            f.scale[c] = m * r * w;
            f.bias[c] = (bias ? bias[c] : 0.0) + f.offset[c] * w;
        }
        forward(s, sx, sy, x + b * bx, y + b * by, narrowed<A>(f.pivot, channels).data(), narrowed<A>(f.scale, channels).data(), narrowed<A>(f.bias, channels).data(), n.slope);
    }
}

template <class T, class A>
static void norm_backward(const Shape& s, const Norm& n, const Strides& sg, const Strides& sx, const Strides& sd, int64_t bg, int64_t bx, int64_t bd, const T* g, const T* x, T* dx, const A* weight, double* numbers, double* dweight, double* dbias) {
    int64_t channels = s.channels, rows = n.joint ? 1 : n.images, width = n.groups ? channels / n.groups : 1;
    double count = double(s.depth * s.height * s.width) * (n.joint ? n.images : 1) * width;
    std::vector<double> weights(rows * channels), biases(rows * channels), total(channels), weighted(channels);
    for (int64_t b = 0; b < n.images; ++b) {
        Numbers f(numbers, b, channels);
        sums(s, sg, sx, g + b * bg, x + b * bx, narrowed<A>(f.pivot, channels).data(), narrowed<A>(f.scale, channels).data(), narrowed<A>(f.bias, channels).data(), n.slope, total.data(), weighted.data());
        for (int64_t c = 0; c < channels; ++c) {
            biases[(n.joint ? 0 : b * channels) + c] += total[c];
            weights[(n.joint ? 0 : b * channels) + c] += f.hat[c] * weighted[c] + f.offset[c] * total[c];
        }
    }
    std::vector<A> tilt(channels), shift(channels);
    for (int64_t b = 0; b < n.images; ++b) {
        Numbers f(numbers, b, channels);
        int64_t row = n.joint ? 0 : b * channels;
        for (int64_t first = 0; first < channels; first += width) {
            double s1 = 0, s2 = 0;
            for (int64_t c = first; c < first + width; ++c) {
                double w = weight ? weight[c] : 1.0;
                s1 += w * biases[row + c], s2 += w * weights[row + c];
            }
            for (int64_t c = first; c < first + width; ++c) {
                tilt[c] = A(-f.hat[c] * f.hat[c] * (s2 / count));
                shift[c] = A(-f.hat[c] * (s1 / count + f.offset[c] * (s2 / count)));
            }
        }
        gradient(s, sg, sx, sd, g + b * bg, x + b * bx, dx + b * bd, narrowed<A>(f.pivot, channels).data(), narrowed<A>(f.scale, channels).data(), narrowed<A>(f.bias, channels).data(), n.slope, tilt.data(), shift.data());
    }
    for (int64_t c = 0; c < channels; ++c) {
        dweight[c] = dbias[c] = 0;
        for (int64_t row = 0; row < rows; ++row) dweight[c] += weights[row * channels + c], dbias[c] += biases[row * channels + c];
    }
}

// ---- for ctypes: one function per dtype -----------------------------------------------------------------------------

#define DISTSEG_EXPORT(NAME, T, A)                                                                                                                  \
    extern "C" void moments_##NAME(const Shape* s, const Strides* sx, const T* x, double* mean, double* m2) { moments(*s, *sx, x, mean, m2); }      \
    extern "C" void forward_##NAME(const Shape* s, const Strides* sx, const Strides* sy, const T* x, T* y, const A* pivot, const A* scale,           \
                                   const A* bias, double slope) {                                                                                   \
        forward(*s, *sx, *sy, x, y, pivot, scale, bias, slope);                                                                                     \
    }                                                                                                                                               \
    extern "C" void sums_##NAME(const Shape* s, const Strides* sg, const Strides* sx, const T* g, const T* x, const A* pivot, const A* scale,        \
                                const A* bias, double slope, double* sum, double* weighted) {                                                       \
        sums(*s, *sg, *sx, g, x, pivot, scale, bias, slope, sum, weighted);                                                                         \
    }                                                                                                                                               \
    extern "C" void gradient_##NAME(const Shape* s, const Strides* sg, const Strides* sx, const Strides* sd, const T* g, const T* x, T* dx,          \
                                    const A* pivot, const A* scale, const A* bias, double slope, const A* tilt, const A* shift) {                   \
        gradient(*s, *sg, *sx, *sd, g, x, dx, pivot, scale, bias, slope, tilt, shift);                                                              \
    }                                                                                                                                               \
    extern "C" void norm_forward_##NAME(const Shape* s, const Norm* n, const Strides* sx, const Strides* sy, int64_t bx, int64_t by, const T* x,      \
                                        T* y, const uint64_t* keys, const A* weight, const A* bias, double* mean, double* m2, double* numbers) {     \
        norm_forward(*s, *n, *sx, *sy, bx, by, x, y, keys, weight, bias, mean, m2, numbers);                                                         \
    }                                                                                                                                               \
    extern "C" void norm_backward_##NAME(const Shape* s, const Norm* n, const Strides* sg, const Strides* sx, const Strides* sd, int64_t bg,          \
                                         int64_t bx, int64_t bd, const T* g, const T* x, T* dx, const A* weight, double* numbers, double* dweight,   \
                                         double* dbias) {                                                                                           \
        norm_backward(*s, *n, *sg, *sx, *sd, bg, bx, bd, g, x, dx, weight, numbers, dweight, dbias);                                                 \
    }

DISTSEG_EXPORT(float32, float, float)
DISTSEG_EXPORT(float64, double, double)
DISTSEG_EXPORT(bfloat16, BFloat16, float)
