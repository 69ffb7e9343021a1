// Names made of macros.
#pragma once
#define QIAO_JOIN_(a, b) a##b
#define QIAO_JOIN(a, b) QIAO_JOIN_(a, b)
#define QIAO_TEXT_(a) #a
#define QIAO_TEXT(a) QIAO_TEXT_(a)
