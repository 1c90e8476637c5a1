// Faster compilation of CuTe by NVRTC, which lacks a builtin for the n-th type of a pack: CCCL
// finds it through several templates for each tuple and each n, a third of the time of a build.
// CuTe's own tuples get a direct answer up to n = 3.
//
// Include it before all other headers of CuTe: a type that is already looked up can no longer be
// specialised.
#pragma once

#include <cute/container/tuple.hpp>

#ifdef CUTE_STL_NAMESPACE_IS_CUDA_STD
namespace cuda::std {

template <class T0, class... T>
struct tuple_element<0, cute::tuple<T0, T...>> {
  using type = T0;
};

template <class T0, class T1, class... T>
struct tuple_element<1, cute::tuple<T0, T1, T...>> {
  using type = T1;
};

template <class T0, class T1, class T2, class... T>
struct tuple_element<2, cute::tuple<T0, T1, T2, T...>> {
  using type = T2;
};

template <class T0, class T1, class T2, class T3, class... T>
struct tuple_element<3, cute::tuple<T0, T1, T2, T3, T...>> {
  using type = T3;
};

}  // namespace cuda::std
#endif
